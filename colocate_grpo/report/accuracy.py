"""pass@1 of base, last and best, with what is known of its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from colocate_grpo.errors import DataError
from colocate_grpo.observe.metrics import EvalPoint
from colocate_grpo.report.record import RunRecord
from colocate_grpo.report.statistics import (
    Interval,
    expected_maximum,
    interval_of_mean,
    paired_difference,
    pass_at_1,
    sampling_noise,
    unpaired_difference,
)
from colocate_grpo.trajectory import read_trajectories

Scores = dict[str, list[float]]
# Sums of a few thousand scores in another order differ by less; another set of answers differs by more.
_SAME = 1e-6


@dataclass(frozen=True)
class Curve:
    """The evaluations of one set under one protocol."""

    name: str
    protocol: str
    baselines: list[EvalPoint]
    trained: list[EvalPoint]

    @property
    def last(self) -> EvalPoint | None:
        return self.trained[-1] if self.trained else None

    @property
    def best(self) -> EvalPoint | None:
        """The earliest of the highest."""
        return max(self.trained, key=lambda point: (point.accuracy, -point.step), default=None)

    def at(self, step: int | None) -> EvalPoint | None:
        return next((point for point in self.trained if point.step == step), None)


@dataclass(frozen=True)
class Measured:
    """One or more evaluations of the same weights taken together."""

    points: list[EvalPoint]
    scores: Scores | None

    @cached_property
    def interval(self) -> Interval:
        if self.scores is not None:
            return pass_at_1(list(problem_means(self.scores).values()))
        value = float(np.mean([point.accuracy for point in self.points]))
        stderr = float(np.mean([point.values.get("stderr", math.nan) for point in self.points]))
        return Interval(value, stderr, *interval_of_mean(value, stderr, self.problems))

    @property
    def problems(self) -> int:
        return int(self.points[0].values.get("problems", 0))

    @property
    def samples(self) -> int:
        """Samples a problem, over all evaluations."""
        return int(sum(point.values.get("samples", 0) for point in self.points))

    def mean(self, metric: str) -> float | None:
        """Mean of a metric such as `response_len/mean` over the evaluations."""
        values = [point.values[metric] for point in self.points if metric in point.values]
        return float(np.mean(values)) if values else None


def curves(run: RunRecord) -> list[Curve]:
    """One curve a set and protocol, sets in the order of the configuration, protocols in the order of use."""
    order = [spec["name"] for spec in run.option("eval.sets") or []]
    by_key: dict[tuple[str, str], list[EvalPoint]] = {}
    for point in sorted(run.evaluations, key=lambda p: p.time):
        by_key.setdefault((point.name, point.protocol), []).append(point)
    found = [_curve(name, protocol, points) for (name, protocol), points in by_key.items()]
    return sorted(found, key=lambda c: order.index(c.name) if c.name in order else len(order))


def best_step(run: RunRecord, found: Sequence[Curve]) -> int | None:
    """Step of the best checkpoint by `checkpoint.best_metric`, else by the first set; the last protocol used."""
    metric = run.option("checkpoint.best_metric") or ""
    candidates = [curve for curve in found if curve.trained]
    chosen = [curve for curve in candidates if f"eval/{curve.name}" == metric]
    if not chosen:
        chosen = [curve for curve in candidates if curve.name == candidates[0].name]
    latest = max(chosen, key=lambda curve: curve.trained[-1].updates, default=None)
    return latest.best.step if latest and latest.best else None


def measure(run: RunRecord, points: Sequence[EvalPoint]) -> Measured | None:
    """Evaluations of the same weights with their answers, where the dumps are there and agree with the metrics."""
    if not points:
        return None
    scores = [_scores(run.run_dir, point) for point in points]
    return Measured(list(points), _together([s for s in scores if s is not None]) if all(scores) else None)


def difference(before: Measured, after: Measured) -> tuple[Interval, bool]:
    """(after - before, whether it is paired by problem). Both must come from one protocol."""
    assert before.points[0].protocol == after.points[0].protocol, "two protocols share no difference"
    if before.scores is not None and after.scores is not None:
        return paired_difference(problem_means(before.scores), problem_means(after.scores)), True
    return unpaired_difference(before.interval, after.interval), False


def selection_gain(curve: Curve, base: Measured | None) -> float | None:
    """How much the best of the curve's evaluations exceeds the truth by selection, were all models equal."""
    if base is None or base.scores is None or len(curve.trained) < 2:
        return None
    repeats = len(base.points)
    noise = sampling_noise(base.scores) * math.sqrt(repeats)
    return expected_maximum(len(curve.trained), noise) if math.isfinite(noise) else None


def problem_means(scores: Scores) -> dict[str, float]:
    return {problem: float(np.mean(values)) for problem, values in scores.items()}


def damaged_dumps(run: RunRecord) -> list[Path]:
    """Dumps of evaluations that are there and cannot be read, of those that a report reads."""
    found = curves(run)
    chosen = best_step(run, found)
    points = [p for c in found for p in (*c.baselines, c.at(chosen), c.last) if p]
    paths = [path for path in dict.fromkeys(dump_path(run.run_dir, p) for p in points) if path.exists()]
    return [path for path in paths if _dumped_scores(path, path.stat().st_mtime_ns) is None]


def dump_path(run_dir: Path, point: EvalPoint) -> Path:
    """The raw answers of an evaluation."""
    which = f"step_{point.step}" if point.baseline is None else f"baseline_{point.baseline}"
    return run_dir / "rollouts" / f"eval_{point.name}_{which}.jsonl.zst"


def _curve(name: str, protocol: str, points: Sequence[EvalPoint]) -> Curve:
    trained = sorted((p for p in points if p.baseline is None), key=lambda p: p.updates)
    baselines = sorted((p for p in points if p.baseline is not None), key=lambda p: p.baseline or 0)
    return Curve(name, protocol, baselines, trained)


def _scores(run_dir: Path, point: EvalPoint) -> Scores | None:
    """Scores by problem; None where the dump is absent, damaged, or of another evaluation of the same step."""
    path = dump_path(run_dir, point)
    if not path.exists():
        return None
    scores = _dumped_scores(path, path.stat().st_mtime_ns)
    if not scores:
        return None
    agrees = abs(np.mean(list(problem_means(scores).values())) - point.accuracy) < _SAME
    return scores if agrees else None


@lru_cache(maxsize=64)
def _dumped_scores(path: Path, _modified_ns: int) -> Scores | None:
    """Read once a report: the dumps of long answers are large. None where the dump is damaged."""
    scores: Scores = {}
    try:
        for t in read_trajectories(path):
            if t.accuracy is not None:
                scores.setdefault(f"{t.prompt_id}#{t.group_id}", []).append(t.accuracy)
    except (DataError, OSError):  # the report names it, and goes on without it
        return None
    return scores


def _together(parts: Iterable[Scores]) -> Scores:
    merged: Scores = {}
    for part in parts:
        for problem, values in part.items():
            merged.setdefault(problem, []).extend(values)
    return merged
