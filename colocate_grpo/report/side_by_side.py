"""A run's figures beside those of another run, or of a published one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocate_grpo.config_file import load_config
from colocate_grpo.errors import DataError
from colocate_grpo.report.accuracy import Curve, curves
from colocate_grpo.report.headline import TRAINING_FIGURES, first_and_last
from colocate_grpo.report.markdown import ABSENT, number, percent, text_table
from colocate_grpo.report.protocols import what_differs
from colocate_grpo.report.record import RunRecord, attempts, load_record

FACTS = {
    "steps": "steps",
    "trajectories_per_step": "trajectories a step",
    "hours": "hours",
    "max_new_tokens": "token limit",
}


@dataclass(frozen=True)
class EvaluationFigures:
    """One evaluation set: pass@1 after each step (the first entry is the base, at step 0)."""

    name: str
    problems: int
    samples: int
    steps: list[int]
    accuracy: list[float]
    truncated_ratio: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """What two runs can be laid side by side with; `training` has (first, last) by metric.

    `configuration`: of a published run, the shipped file that does the same.
    """

    name: str
    source: str
    facts: dict[str, Any]
    evaluations: list[EvaluationFigures]
    training: dict[str, tuple[float, float]]
    configuration: str | None = None


def published_figures(path: Path) -> Figures:
    """Figures from a JSON file. Raises DataError where it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        evaluations = [EvaluationFigures(**entry) for entry in values["evaluations"]]
        training = {metric: (first, last) for metric, (first, last) in values["training"].items()}
        named = values.get("configuration")
        return Figures(values["name"], values["source"], values["facts"], evaluations, training, named)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:  # no JSON, or JSON of another shape
        raise DataError(
            f"{path}: not a file of reference figures ({error}); see reports/reference_8x4090.json"
        ) from None


def run_figures(run: RunRecord) -> Figures:
    """Figures of a run, from its own record."""
    training = {}
    for metric, _ in TRAINING_FIGURES.values():
        first, last = first_and_last(run, metric)
        if first is not None and last is not None:
            training[metric] = first, last
    return Figures(
        name=run.name,
        source=f"`{run.run_dir.name}`, from its metrics.jsonl",
        facts=_facts(run),
        evaluations=[_evaluation(curve) for curve in curves(run)],
        training=training,
    )


def side_by_side_section(run: RunRecord, reference: Path | None, compare: Path | None) -> str | None:
    """The section, or None where there is nothing to compare with."""
    others = [published_figures(reference)] if reference else []
    compared = load_record(compare) if compare else None
    others += [run_figures(compared)] if compared else []
    if not others:
        return None
    figures = [run_figures(run), *others]
    header = ["", *(f.name for f in figures)]
    sources = "\n".join(f"* {f.name}: {f.source}" for f in figures)
    parts = ["## Side by side", text_table(header, _rows(figures)), sources, _warning()]
    return "\n\n".join([*parts, *(_protocol_notes(run, compared) if compared else [])])


def other_configurations(reference: Path | None, compare: Path | None) -> dict[str, dict[str, Any]]:
    """By name, the configuration that a published run's figures name, and that of the other run."""
    found = {}
    named = published_figures(reference).configuration if reference else None
    if named:
        found[f"`{Path(named).name}`"] = load_config(named).model_dump(mode="json")
    if compare and (config := load_record(compare).config):
        found[f"the run `{compare.name}`"] = config
    return found


def _protocol_notes(run: RunRecord, other: RunRecord) -> Iterator[str]:
    """Whether the sets that both runs have were evaluated alike, and what was done otherwise; the last protocols."""
    mine, theirs = ({curve.name: curve.protocol for curve in curves(r)} for r in (run, other))
    for name in (name for name in mine if name in theirs):
        if mine[name] == theirs[name]:
            yield f"`eval/{name}`: both runs were evaluated by the protocol `{mine[name]}`."
        else:
            pair = run.protocols.get((name, mine[name])), other.protocols.get((name, theirs[name]))
            yield f"`eval/{name}`: **the protocols differ**, this run's from the other's: {what_differs(*pair)}."


def _warning() -> str:
    return (
        "These are figures beside each other and no differences: model, data, protocol and hardware may differ,"
        " and a difference without a common protocol has no interval."
    )


def _rows(figures: Sequence[Figures]) -> Iterator[list[str]]:
    for key, label in FACTS.items():
        if any(key in f.facts for f in figures):
            yield [label, *(_fact(f.facts.get(key)) for f in figures)]
    for name, (metric, show) in TRAINING_FIGURES.items():
        if any(metric in f.training for f in figures):
            yield [f"training {name}, first → last", *(_change(f.training.get(metric), show) for f in figures)]
    for name in dict.fromkeys(e.name for f in figures for e in f.evaluations):
        found = [[e for e in f.evaluations if e.name == name] for f in figures]
        yield [f"{name} pass@1", *(_joined(entries, _accuracies) for entries in found)]
        yield [f"{name} problems × samples", *(_joined(e, lambda x: f"{x.problems} × {x.samples}") for e in found)]
        if any(e.truncated_ratio for entries in found for e in entries):
            yield [f"{name} truncated, first → last", *(_joined(entries, _truncated) for entries in found)]


def _joined(entries: list[EvaluationFigures], show: Callable[[EvaluationFigures], str]) -> str:
    """Several entries of one set are several protocols: never one curve."""
    return "; other protocol: ".join(show(entry) for entry in entries) or ABSENT


def _accuracies(entry: EvaluationFigures) -> str:
    pairs = [f"{percent(value)} ({step})" for step, value in zip(entry.steps, entry.accuracy, strict=True)]
    if len(pairs) > 8:
        best = max(range(len(pairs)), key=lambda i: (entry.accuracy[i], -i))
        return f"{pairs[0]} → {pairs[-1]}, highest of {len(pairs)}: {pairs[best]}"
    return " → ".join(pairs) + (" (after step)" if len(pairs) > 1 else "")


def _truncated(entry: EvaluationFigures) -> str:
    return _change((entry.truncated_ratio[0], entry.truncated_ratio[-1]) if entry.truncated_ratio else None, percent)


def _change(pair: tuple[float, float] | None, show: Callable[[float | None], str]) -> str:
    return f"{show(pair[0])} → {show(pair[1])}" if pair else ABSENT


def _fact(value: Any) -> str:
    return number(float(value), digits=4) if isinstance(value, int | float) else str(value or ABSENT)


def _evaluation(curve: Curve) -> EvaluationFigures:
    shown = [*curve.baselines[:1], *curve.trained]
    base = [sum(p.accuracy for p in curve.baselines) / len(curve.baselines)] if curve.baselines else []
    return EvaluationFigures(
        name=curve.name,
        problems=int(shown[0].values.get("problems", 0)),
        samples=int(shown[0].values.get("samples", 0)),
        steps=[p.step for p in shown],
        accuracy=[*base, *(p.accuracy for p in curve.trained)],
        truncated_ratio=[p.values["truncated_ratio"] for p in shown if "truncated_ratio" in p.values],
    )


def _facts(run: RunRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {"steps": len(run.steps)}
    prompts, answers = run.option("rollout.prompts_per_step"), run.option("rollout.group_size")
    if prompts and answers:
        facts["trajectories_per_step"] = prompts * answers
    if limits := _limits(run):
        facts["max_new_tokens"] = limits
    if hours := _hours(run):
        facts["hours"] = hours
    return facts


def _limits(run: RunRecord) -> str | None:
    training = run.option("rollout.max_new_tokens")
    if training is None:
        return None
    limits = {spec.get("max_new_tokens") or training for spec in run.option("eval.sets") or []}
    evaluation = f", {' / '.join(map(number, sorted(limits)))} in evaluation" if limits else ""
    return f"{number(training)} in training{evaluation}"


def _hours(run: RunRecord) -> float | None:
    """Hours inside attempts, from each one's first to its last entry."""
    spans = [entries[-1]["time"] - entries[0]["time"] for entries in attempts(run).values()]
    return sum(spans) / 3600 if spans else None
