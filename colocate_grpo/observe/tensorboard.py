"""TensorBoard files, derived from metrics.jsonl and never the truth."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from colocate_grpo.observe.jsonl import Row
from colocate_grpo.observe.metrics import RESERVED, EvalPoint, StepView, eval_points, read_rows, view

Scalar = tuple[str, float, int]


class TensorBoardLog:
    """Mirrors rows into `tensorboard/` under the names of the metrics.

    Step metrics lie at their step. Evaluations lie at the number of updates before them, so that the untouched
    model (0) and the end of step 0 (1) differ; repeats of the untouched model are `eval_baseline/NAME`. A set
    that changes its protocol goes on under `eval/NAME@FINGERPRINT`: two protocols never share a curve.
    """

    def __init__(self, run_dir: Path, kept_step: int | None = None):
        """`kept_step`: the last step that counts when a run resumes (-1 for none); later points are purged."""
        counted = view(read_rows(run_dir))
        self._protocols = _first_protocols(counted.evaluations)
        purge = None if kept_step is None else kept_step + 1
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)
        if purge is not None:
            self._write(s for s in self._scalars(counted) if s[2] >= purge)

    def add(self, row: Row) -> None:
        """Mirror one "step" or "eval" row; other kinds have no points."""
        if row["kind"] == "step":
            self._write(_step_scalars(row))
        elif row["kind"] == "eval":
            for point in eval_points(row):
                self._write(self._eval_scalars(point))

    def close(self) -> None:
        self._writer.close()

    def write(self, counted: StepView) -> None:
        """Mirror everything that counts."""
        self._write(self._scalars(counted))

    def _scalars(self, counted: StepView) -> Iterator[Scalar]:
        for row in counted.steps.values():
            yield from _step_scalars(row)
        for point in counted.evaluations:
            yield from self._eval_scalars(point)

    def _eval_scalars(self, point: EvalPoint) -> Iterator[Scalar]:
        first = self._protocols.setdefault(point.name, point.protocol)
        name = point.name if point.protocol == first else f"{point.name}@{point.protocol[:8]}"
        if point.baseline is not None:
            yield f"eval_baseline/{name}", point.accuracy, point.baseline
        if not point.baseline:
            for key, value in point.values.items():
                yield f"eval/{name}" if key == "accuracy" else f"eval/{name}/{key}", value, point.updates

    def _write(self, scalars: Iterator[Scalar]) -> None:
        for name, value, step in scalars:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def rebuild(run_dir: Path) -> Path:
    """Write `tensorboard/` anew from metrics.jsonl and return it."""
    directory = Path(run_dir) / "tensorboard"
    if directory.exists():
        shutil.rmtree(directory)
    log = TensorBoardLog(run_dir)
    log.write(view(read_rows(run_dir)))
    log.close()
    return directory


def _step_scalars(row: Row) -> Iterator[Scalar]:
    for key, value in row.items():
        if key not in RESERVED and isinstance(value, int | float):
            yield key, float(value), row["step"]


def _first_protocols(points: list[EvalPoint]) -> dict[str, str]:
    first: dict[str, str] = {}
    for point in sorted(points, key=lambda p: p.time):
        first.setdefault(point.name, point.protocol)
    return first
