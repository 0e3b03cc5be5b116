"""Everything a report is computed from, read once from a run directory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from colocate_grpo.checkpoint.scan import MANIFEST, own_paths, step_of
from colocate_grpo.errors import DataError
from colocate_grpo.observe import events, metrics
from colocate_grpo.observe.jsonl import DamagedLine, Row
from colocate_grpo.observe.metrics import EvalPoint, StepView, view
from colocate_grpo.report.figures import usable_figures
from colocate_grpo.report.options import read_options, usable_options

PARTS = "protocol_parts/"


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell it; nothing here is computed yet but what counts (`counted`).

    `lost_figures`: in how many rows a key is missing or no figure; `unusable_options`: what is wrong with an option.
    """

    run_dir: Path
    config: dict[str, Any]
    rows: list[Row]
    counted: StepView
    events: list[Row]
    damaged: list[DamagedLine]
    lost_figures: Counter[str]
    unusable_options: dict[str, str]

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

    @property
    def evaluations(self) -> list[EvalPoint]:
        """Counted evaluations."""
        return self.counted.evaluations

    @cached_property
    def protocols(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What the protocols are made of, by set and fingerprint, where the evaluations recorded it."""
        parts = {}
        for row in self.rows:
            for key in row:
                name = key.removeprefix(PARTS)
                if key.startswith(PARTS) and f"protocol/{name}" in row:
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


def load_record(run_dir: Path) -> RunRecord:
    """Read a run, finished or still going. Raises DataError where `run_dir` is no run directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such run directory")
    written = metrics.MetricsLog.read(run_dir)
    happened = events.EventLog.read(run_dir)
    config_file = run_dir / "config.yaml"
    if not (config_file.exists() or written.rows or happened.rows):
        raise DataError(f"{run_dir}: not a run directory: neither config.yaml nor {metrics.FILE_NAME} is there")
    rows, lost_figures = usable_figures(written.rows)
    config, unusable_options = usable_options(read_options(config_file))
    return RunRecord(
        run_dir=run_dir,
        config=config,
        rows=rows,
        counted=view(rows),
        events=happened.rows,
        damaged=written.damaged + happened.damaged,
        lost_figures=lost_figures,
        unusable_options=unusable_options,
    )


def attempts(run: RunRecord) -> dict[int, list[Row]]:
    """Rows and events by attempt, in the order of time."""
    entries: dict[int, list[Row]] = {}
    for entry in sorted((*run.rows, *run.events), key=lambda e: e["time"]):
        entries.setdefault(entry["attempt"], []).append(entry)
    return dict(sorted(entries.items()))
