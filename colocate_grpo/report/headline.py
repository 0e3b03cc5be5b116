"""The headline table: base against last and best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from colocate_grpo.observe.jsonl import Row
from colocate_grpo.report.accuracy import (
    Curve,
    Measured,
    best_step,
    curves,
    difference,
    measure,
    problem_means,
    selection_gain,
)
from colocate_grpo.report.markdown import ABSENT, number, percent, points, table
from colocate_grpo.report.record import RunRecord
from colocate_grpo.report.statistics import FEW, Interval, differ_rarely

EVAL_FIGURES = {
    "response length, mean": ("response_len/mean", number),
    "response length, median": ("response_len/median", number),
    "truncated": ("truncated_ratio", percent),
    "degenerate repetition": ("repetition_frac", percent),
    "no answer": ("no_answer_ratio", percent),
}
TRAINING_FIGURES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "reward": ("rollout/raw_reward", number),
    "response length, mean": ("rollout/response_len/mean", number),
    "response length, median": ("rollout/response_len/median", number),
    "truncated": ("rollout/truncated_ratio", percent),
    "degenerate repetition": ("rollout/repetition_frac", percent),
    "entropy": ("train/entropy_loss", number),
    "train/rollout log-prob difference": ("train/train_rollout_logprob_abs_diff", number),
}
MAX_WINDOW = 10


@dataclass(frozen=True)
class Comparison:
    """One curve's base, last and best, as far as they exist."""

    curve: Curve
    base: Measured | None
    last: Measured | None
    best: Measured | None


def comparisons(run: RunRecord) -> list[Comparison]:
    """One for each set and protocol."""
    found = curves(run)
    chosen = best_step(run, found)
    return [_comparison(run, curve, chosen) for curve in found]


def window(steps: int) -> int:
    """Steps averaged at each end of a run: enough to quieten a single batch, and no more than a fifth of the run."""
    return max(1, min(MAX_WINDOW, steps // 5))


def mean_of(rows: Sequence[Row], metric: str) -> float | None:
    """Mean over the steps that have the metric; skipped steps (nothing trained) have no loss to average."""
    values = [row[metric] for row in rows if isinstance(row.get(metric), int | float)]
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite else None


def first_and_last(run: RunRecord, metric: str) -> tuple[float | None, float | None]:
    """Means over the windows at both ends of the run."""
    size = window(len(run.steps))
    return mean_of(run.steps[:size], metric), mean_of(run.steps[-size:], metric)


def headline_section(run: RunRecord) -> str:
    """Section 1 of the report."""
    found = comparisons(run)
    parts = ["## Headline", *(_evaluation_part(c) for c in found)]
    if run.steps:
        parts.append(_training_part(run, best_step(run, curves(run))))
    if not found and not run.steps:
        parts.append("There is nothing to show yet.")
    return "\n\n".join(parts)


def interval_text(interval: Interval) -> str:
    """`+7.5 [+1.2, +13.8]` in percentage points."""
    return f"{points(interval.value)} [{points(interval.low)}, {points(interval.high)}]"


def rate_text(measured: Measured) -> str:
    """`57.5 % ± 3.1` with the clustered standard error in percentage points."""
    stderr = measured.interval.stderr
    plus_minus = f" ± {100 * stderr:.1f}" if math.isfinite(stderr) else ""
    return f"{percent(measured.interval.value)}{plus_minus}"


def _comparison(run: RunRecord, curve: Curve, chosen: int | None) -> Comparison:
    best = curve.at(chosen)
    return Comparison(
        curve,
        base=measure(run, curve.baselines),
        last=measure(run, [curve.last] if curve.last else []),
        best=measure(run, [best] if best else []),
    )


def _evaluation_part(c: Comparison) -> str:
    first = next(m for m in (c.base, c.last, c.best) if m)
    samples = int(first.points[0].values.get("samples", 0))
    title = f"### `eval/{c.curve.name}`: {first.problems} problems × {samples} samples, protocol `{c.curve.protocol}`"
    header = ["", _base_title(c), _last_title(c), _best_title(c)]
    return "\n\n".join([title, table(header, _evaluation_rows(c)), *_evaluation_notes(c)])


def _base_title(c: Comparison) -> str:
    repeats = len(c.curve.baselines)
    return f"base (mean of {repeats} evaluations)" if repeats > 1 else "base"


def _last_title(c: Comparison) -> str:
    return f"last (step {c.curve.last.step})" if c.curve.last else "last"


def _best_title(c: Comparison) -> str:
    if c.best is None:
        return "best"
    return f"best (step {c.best.points[0].step}, chosen from {len(c.curve.trained)})"


def _evaluation_rows(c: Comparison) -> Iterator[list[str]]:
    columns = [c.base, c.last, c.best]
    yield ["pass@1 ± standard error", *(rate_text(m) if m else ABSENT for m in columns)]
    yield ["95 % interval", *(_limits(m.interval) if m else ABSENT for m in columns)]
    yield ["difference from base, points [95 %]", ABSENT, *(_difference_cell(c.base, m) for m in (c.last, c.best))]
    for name, (metric, show) in EVAL_FIGURES.items():
        if any(m and m.mean(metric) is not None for m in columns):
            yield [name, *(show(m.mean(metric)) if m else ABSENT for m in columns)]


def _limits(interval: Interval) -> str:
    if not math.isfinite(interval.stderr):
        return ABSENT
    return f"{percent(interval.low)} to {percent(interval.high)}"


def _difference_cell(base: Measured | None, after: Measured | None) -> str:
    if base is None or after is None:
        return ABSENT
    interval, _ = difference(base, after)
    verdict = " (not told apart from 0)" if interval.includes_zero else ""
    return interval_text(interval) + verdict


def _evaluation_notes(c: Comparison) -> Iterator[str]:
    yield "Standard errors are clustered by problem." + _pairing_note(c)
    if c.base is None and c.last:
        yield "The untouched model was not evaluated under this protocol, so there is no difference to tell."
    if c.best and c.best.points[0] is c.curve.best and len(c.curve.trained) > 1:
        yield _peak_note(c)


def _pairing_note(c: Comparison) -> str:
    if not (c.base and c.last):
        return ""
    _, paired = difference(c.base, c.last)
    if paired:
        return " Differences are paired by problem; their interval is Student's t over the problems" + _rarity_note(c)
    return (
        " The raw answers of these evaluations are not all there, so that differences are taken as of unpaired"
        " samples, which mostly is wider than a comparison problem by problem."
    )


def _rarity_note(c: Comparison) -> str:
    means = [problem_means(m.scores) for m in (c.base, c.last, c.best) if m and m.scores is not None]
    if not any(differ_rarely(means[0], after) for after in means[1:]):
        return "."
    return (
        f", and where fewer than {FEW} of them differ from the rest, that of Bonett and Price (2012), which has a width"
        " also where all agree."
    )


def _peak_note(c: Comparison) -> str:
    if c.curve.best is c.curve.last:
        return f"The best of {len(c.curve.trained)} evaluations is the last one, so that nothing had to be chosen."
    gain = selection_gain(c.curve, c.base)
    text = (
        f"**The best of {len(c.curve.trained)} evaluations is a chosen peak**: its figure and its interval are"
        " biased upwards, unlike those of the last one."
    )
    if gain is None:
        return text
    return (
        f"{text} Among {len(c.curve.trained)} equally good models the best would look {points(gain)} points too good."
    )


def _training_part(run: RunRecord, chosen: int | None) -> str:
    size = window(len(run.steps))
    before_best = [row for row in run.steps if chosen is not None and row["step"] <= chosen][-size:]
    groups = [run.steps[:size], run.steps[-size:], before_best]
    plural = f"mean of {size} steps" if size > 1 else "one step"
    header = [
        f"training ({plural})",
        f"first (step {_span(groups[0])})",
        f"last (step {_span(groups[1])})",
        f"up to the best (step {_span(groups[2])})" if before_best else "up to the best",
    ]
    rows = [
        [name, *(show(mean_of(group, metric)) for group in groups)]
        for name, (metric, show) in TRAINING_FIGURES.items()
        if any(mean_of(group, metric) is not None for group in groups)
    ]
    return "\n\n".join(["### Training", table(header, rows)])


def _span(rows: Sequence[Row]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    return str(first) if first == last else f"{first}–{last}"
