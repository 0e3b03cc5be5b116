"""What a report lacks and why, in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from colocate_grpo.report.accuracy import damaged_dumps
from colocate_grpo.report.record import RunRecord
from colocate_grpo.report.samples import damaged_samples

# Options that sections of the report are written from.
OPTIONS = (
    "run.steps",
    "model.path",
    "data.train",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "eval.sets",
)


def missing(run: RunRecord) -> list[str]:
    """One line for each thing; empty where all is there."""
    return list(chain(_configuration(run), _steps(run), _evaluations(run), _damage(run)))


def _configuration(run: RunRecord) -> Iterator[str]:
    if not (run.config or run.unusable_options):
        yield "`config.yaml` is missing or damaged: the configuration and everything read from it is left out."
        return
    for key, message in run.unusable_options.items():
        yield f"`{key}` in `config.yaml` has a value that is none of its own and left out: {message}."
    absent = [f"`{key}`" for key in OPTIONS if run.option(key) is None and key not in run.unusable_options]
    if absent:
        yield f"`config.yaml` is not whole: {', '.join(absent)} and what is read from there is left out."


def _steps(run: RunRecord) -> Iterator[str]:
    if not run.counted.steps:
        yield "No finished step is recorded: there are no training figures and no curves."
    elif len(run.counted.steps) == 1:
        yield "Only one step is recorded: first and last are the same, and there is no trend."
    planned = run.option("run.steps")
    if planned and run.counted.steps and len(run.counted.steps) < planned:
        yield f"{len(run.counted.steps)} of {planned} steps are recorded: the run has not finished."


def _evaluations(run: RunRecord) -> Iterator[str]:
    if not run.counted.evaluations:
        yield "No evaluation is recorded: nothing here says whether the model became better."
    elif all(point.baseline is None for point in run.counted.evaluations):
        yield "The untouched model was not evaluated: there is no base to compare with."
    elif all(point.baseline is not None for point in run.counted.evaluations):
        yield "Only the untouched model was evaluated: there is no result after training."


def _damage(run: RunRecord) -> Iterator[str]:
    if not run.events:
        yield "`events.jsonl` is missing or empty: the engineering log is left out."
    for damaged in run.damaged:
        yield f"`{damaged.path.name}` line {damaged.number} is damaged and left out: `{damaged.beginning}`"
    for key, rows in sorted(run.lost_figures.items()):
        yield f"`{key}` is missing or no figure in {rows} rows of `metrics.jsonl`, and left out there."
    for path in [*damaged_dumps(run), *damaged_samples(run)]:
        yield f"`{path.relative_to(run.run_dir)}` is damaged: its answers are left out."
