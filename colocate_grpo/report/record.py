"""Everything a report is computed from, read once from a run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from colocate_grpo.checkpoint.scan import MANIFEST, own_paths, step_of
from colocate_grpo.errors import DataError
from colocate_grpo.observe import events, metrics
from colocate_grpo.observe.jsonl import DamagedLine, Row
from colocate_grpo.observe.metrics import EvalPoint, StepView, view

PARTS = "protocol_parts/"


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell it; nothing here is computed yet but what counts (`counted`)."""

    run_dir: Path
    config: dict[str, Any]
    rows: list[Row]
    counted: StepView
    events: list[Row]
    damaged: list[DamagedLine]

    @property
    def name(self) -> str:
        return str(self.option("run.name") or self.run_dir.resolve().name)

    def option(self, key: str, default: Any = None) -> Any:
        """The value of `section.key` in the run's configuration."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def evaluations(self) -> list[EvalPoint]:
        """Counted evaluations that have a result."""
        return [point for point in self.counted.evaluations if math.isfinite(point.accuracy)]

    @cached_property
    def protocols(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What the protocols are made of, by set and fingerprint, where the evaluations recorded it."""
        parts = {}
        for row in self.rows:
            for key in row:
                if key.startswith(PARTS):
                    name = key.removeprefix(PARTS)
                    parts[name, row[f"protocol/{name}"]] = row[key]
        return parts

    @cached_property
    def steps(self) -> list[Row]:
        return list(self.counted.steps.values())

    def of_kind(self, *kinds: str) -> list[Row]:
        """Events of these kinds in order."""
        return [event for event in self.events if event.get("kind") in kinds]

    def checkpoint_steps(self) -> list[int]:
        """Steps whose checkpoint directory is there now."""
        found = own_paths(self.run_dir / "checkpoints")
        return sorted(step_of(path.name) for path in found if (path / MANIFEST).is_file())

    def missing(self) -> list[str]:
        """What this report lacks and why, in words."""
        return list(_missing(self))


def load_record(run_dir: Path) -> RunRecord:
    """Read a run, finished or still going. Raises DataError where `run_dir` is no run directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such run directory")
    rows = metrics.MetricsLog.read(run_dir)
    happened = events.EventLog.read(run_dir)
    config_file = run_dir / "config.yaml"
    if not (config_file.exists() or rows.rows or happened.rows):
        raise DataError(f"{run_dir}: not a run directory: neither config.yaml nor {metrics.FILE_NAME} is there")
    return RunRecord(
        run_dir=run_dir,
        config=_read_config(config_file),
        rows=rows.rows,
        counted=view(rows.rows),
        events=happened.rows,
        damaged=rows.damaged + happened.damaged,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """The options of a run, empty where there are none to read: its rows are worth a report without them."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return values if isinstance(values, dict) else {}


def attempts(run: RunRecord) -> dict[int, list[Row]]:
    """Rows and events by attempt, in the order of time."""
    entries: dict[int, list[Row]] = {}
    for entry in sorted((*run.rows, *run.events), key=lambda e: e.get("time", 0.0)):
        if "attempt" in entry and "time" in entry:
            entries.setdefault(entry["attempt"], []).append(entry)
    return dict(sorted(entries.items()))


def _missing(run: RunRecord) -> Iterator[str]:
    if not run.config:
        yield "`config.yaml` is missing or damaged: the configuration and everything read from it is left out."
    if not run.counted.steps:
        yield "No finished step is recorded: there are no training figures and no curves."
    elif len(run.counted.steps) == 1:
        yield "Only one step is recorded: first and last are the same, and there is no trend."
    planned = run.option("run.steps")
    if planned and run.counted.steps and len(run.counted.steps) < planned:
        yield f"{len(run.counted.steps)} of {planned} steps are recorded: the run has not finished."
    if not run.evaluations:
        yield "No evaluation is recorded: nothing here says whether the model became better."
    elif all(point.baseline is None for point in run.evaluations):
        yield "The untouched model was not evaluated: there is no base to compare with."
    elif all(point.baseline is not None for point in run.evaluations):
        yield "Only the untouched model was evaluated: there is no result after training."
    if not run.events:
        yield "`events.jsonl` is missing or empty: the engineering log is left out."
    for damaged in run.damaged:
        yield f"`{damaged.path.name}` line {damaged.number} is damaged and left out: `{damaged.beginning}`"
