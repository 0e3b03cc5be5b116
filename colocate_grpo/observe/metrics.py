"""metrics.jsonl: the append-only truth of a run, and the view of it that counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from colocate_grpo.checkpoint.files import has_shape
from colocate_grpo.observe.jsonl import AttemptLog, Row, Stamped

Kind = Literal["step", "eval", "rollback", "attempt"]
RESERVED = ("kind", "step", "attempt", "time")
FILE_NAME = "metrics.jsonl"


class MetricsRow(Stamped):
    """What every row has, and what is reckoned with where a row has it."""

    step: int
    came_from: int = Field(0, alias="from")
    rollback: int = 0
    reason: str = ""
    baseline: int | None = None
    updates: int = 0


class MetricsLog(AttemptLog):
    """Writes the rows of one attempt."""

    file_name = FILE_NAME
    shape = MetricsRow

    def append(self, kind: Kind, step: int, values: Mapping[str, Any]) -> Row:
        """Append a row and return it as it was written.

        `step`: of "step" and "eval" rows the 0-based step (0 for the untouched model); of "rollback" and
        "attempt" rows the last step that is kept, -1 for none: what came after it is done anew.
        """
        clash = [key for key in RESERVED if key in values]
        assert not clash, f"reserved keys among the metrics: {clash}"
        return self.add(kind, {"step": step, **values})


def read_rows(run_dir: Path) -> list[Row]:
    """All rows in the order of writing; a damaged line is left out with a warning."""
    return MetricsLog.rows(run_dir)


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation of one set; `values` has the metrics without their `eval/NAME` prefix, pass@1 as `accuracy`."""

    name: str
    protocol: str
    step: int
    updates: int
    baseline: int | None
    attempt: int
    time: float
    values: dict[str, float]

    @property
    def accuracy(self) -> float:
        return self.values["accuracy"]

    @property
    def key(self) -> tuple[str, str, int, int | None]:
        return self.name, self.protocol, self.step, self.baseline


@dataclass(frozen=True)
class Removal:
    """Rows that no longer count, because the run went back to the end of step `kept`."""

    cause: Literal["rollback", "resume"]
    kept: int
    came_from: int
    attempt: int
    time: float
    steps: list[int]
    evaluations: list[EvalPoint]
    reason: str = ""


@dataclass(frozen=True)
class StepView:
    """What counts: one row a step, one point an evaluation."""

    steps: dict[int, Row] = field(default_factory=dict)
    evaluations: list[EvalPoint] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)

    @property
    def last_step(self) -> int | None:
        return max(self.steps) if self.steps else None

    @property
    def next_step(self) -> int:
        """The step to be done next."""
        return max(self.steps, default=-1) + 1

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps at which `metric` was measured, and its values."""
        steps = [step for step, row in self.steps.items() if is_number(row.get(metric))]
        return steps, [float(self.steps[step][metric]) for step in steps]


def view(rows: Iterable[Row]) -> StepView:
    """The last row of each step wins; rows that a rollback or a resume went back over are gone, and told.

    Steps are done in order: a row of a step also ends what an earlier attempt had written beyond it. Evaluations
    of the untouched model are never removed: nothing that was trained is in them. What is no row is left out.
    """
    rows_so_far = _Counting()
    for row in rows:
        if not has_shape(row, MetricsRow):
            continue
        kind = row["kind"]
        if kind == "step":
            if rows_so_far.has_step_beyond(row):
                rows_so_far.go_back({**row, "kind": "attempt", "step": row["step"] - 1})
            rows_so_far.steps[row["step"]] = row
        elif kind == "eval":
            rows_so_far.points.update({point.key: point for point in eval_points(row)})
        elif kind in ("rollback", "attempt"):
            rows_so_far.go_back(row)
    return rows_so_far.view()


class _Counting:
    """What counts after some of the rows."""

    def __init__(self) -> None:
        self.steps: dict[int, Row] = {}
        self.points: dict[tuple[str, str, int, int | None], EvalPoint] = {}
        self.removals: list[Removal] = []

    def has_step_beyond(self, row: Row) -> bool:
        """True where an earlier attempt wrote the step of `row`, or a later one."""
        return any(step >= row["step"] and old["attempt"] < row["attempt"] for step, old in self.steps.items())

    def go_back(self, row: Row) -> None:
        """Remove what lies beyond the step of a "rollback" or "attempt" row."""
        gone = sorted(step for step in self.steps if step > row["step"])
        lost = [point for point in self.points.values() if _is_beyond(point, row)]
        cause: Literal["rollback", "resume"] = "rollback" if row["kind"] == "rollback" else "resume"
        came_from = row["from"] if "from" in row else max([row["step"], *gone])
        if gone or lost or cause == "rollback":
            self.removals.append(
                Removal(cause, row["step"], came_from, row["attempt"], row["time"], gone, lost, row.get("reason", ""))
            )
        self.steps = {step: kept for step, kept in self.steps.items() if step <= row["step"]}
        self.points = {key: point for key, point in self.points.items() if point not in lost}

    def view(self) -> StepView:
        ordered = sorted(self.points.values(), key=lambda p: (p.name, p.protocol, p.updates, p.baseline or 0))
        return StepView(dict(sorted(self.steps.items())), ordered, self.removals)


def _is_beyond(point: EvalPoint, row: Row) -> bool:
    """Whether going back to the step of `row` takes `point` away; today's attempt may have evaluated anew already."""
    if point.baseline is not None or point.step <= row["step"]:
        return False
    return row["kind"] == "rollback" or point.attempt < row["attempt"]


def eval_points(row: Row) -> list[EvalPoint]:
    """The evaluation sets of one "eval" row."""
    prefix = "protocol/"
    names = [key.removeprefix(prefix) for key in row if key.startswith(prefix) and isinstance(row[key], str)]
    return [_eval_point(row, name) for name in names if is_number(row.get(f"eval/{name}"))]


def _eval_point(row: Row, name: str) -> EvalPoint:
    baseline = row.get("baseline")
    prefix = f"eval/{name}/"
    values = {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix) and is_number(row[key])}
    return EvalPoint(
        name=name,
        protocol=row[f"protocol/{name}"],
        step=row["step"],
        updates=row.get("updates", 0 if baseline is not None else row["step"] + 1),
        baseline=baseline,
        attempt=row["attempt"],
        time=row["time"],
        values={"accuracy": row[f"eval/{name}"], **values},
    )


def is_number(value: Any) -> bool:
    """Whether a metric was measured: JSON's null, a text or a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
