"""Guards: pure functions that look at metrics and say what is wrong, with the numbers that say so.

They come from runs that were lost: entropy that rose from 0.66 to 1.82 in 14 steps; nine tenths of the sandboxes
failing, scored 0 and trained on; a resume after which trainer and engine no longer agreed. A trend is judged by the
medians of the two ends of its window, so that one odd step neither fires a guard nor hides a drift. A fall of the
reward must exceed both the configured share and what chance does to a mean over so few prompts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from colocate_grpo.config import Action, RolloutGuards, StepGuards

Row = Mapping[str, Any]
REWARD = "rollout/raw_reward"
REWARD_ERROR = "rollout/raw_reward/stderr"
ENTROPY = "train/entropy_loss"
MISMATCH = "train/train_rollout_logprob_abs_diff"
GRAD_NORM = "train/grad_norm"
MIN_HISTORY = 5
CHANCE_SIGMAS = 4.0
# Below these a ratio says nothing: rounding errors of an exact engine, the entropy of a task that is nearly solved.
MISMATCH_FLOOR = 1e-4
ENTROPY_FLOOR = 0.1


@dataclass(frozen=True)
class Firing:
    """A guard that fired: what to do, one sentence, and the numbers behind it."""

    name: str
    action: Action
    message: str
    numbers: dict[str, float] = field(default_factory=dict)


def check_rollout(metrics: Row, guards: RolloutGuards) -> list[Firing]:
    """Guards on one batch, before anything is trained on it."""
    firings = []
    for name, metric, what in (
        ("failed_ratio", "rollout/failed_ratio", "of the trajectories failed for want of infrastructure"),
        ("truncated_ratio", "rollout/truncated_ratio", "of the answers were cut off"),
        ("repetition", "rollout/repetition_frac", "of the answers repeat themselves"),
    ):
        value, limit = metrics.get(metric), getattr(guards, f"{name}_limit")
        if value is not None and value > limit:
            message = f"{value:.1%} {what} (limit {limit:.1%})"
            firings.append(Firing(name, getattr(guards, name), message, {"value": value, "limit": limit}))
    if metrics.get("rollout/zero_variance_ratio") == 1.0:
        reward = float(metrics.get(REWARD, math.nan))
        message = f"no group has rewards that differ (mean {reward:g}): there is nothing to learn from"
        firings.append(Firing("equal_rewards", guards.equal_rewards, message, {"reward": reward}))
    return _active(firings)


def check_step(history: Sequence[Row], guards: StepGuards, resumed_at: int | None = None) -> list[Firing]:
    """Guards on the last step of `history` (rows of metrics in the order of steps), before it is saved.

    `resumed_at`: the first step of this attempt, where it went on from a checkpoint.
    """
    checks = (_non_finite, _grad_norm_spike, _reward_collapse, _entropy_rise, _entropy_collapse, _logprob_mismatch)
    firings = [firing for check in checks for firing in check(history, guards)]
    if resumed_at is not None:
        firings += _mismatch_after_resume(history, guards, resumed_at)
    return _active(firings)


def _active(firings: list[Firing]) -> list[Firing]:
    return [firing for firing in firings if firing.action != "off"]


def _values(history: Sequence[Row], metric: str) -> list[float]:
    """The metric over the steps that have it and were trained on."""
    rows = [row for row in history if not row.get("train/skipped")]
    return [float(row[metric]) for row in rows if row.get(metric) is not None and math.isfinite(row[metric])]


def _ends(values: Sequence[float], window: int) -> tuple[float, float] | None:
    """Medians of the first and the last third of the last `window` values; None before there are so many."""
    if len(values) < window:
        return None
    part = max(1, window // 3)
    recent = values[-window:]
    return median(recent[:part]), median(recent[-part:])


def _rises(values: Sequence[float], window: int) -> bool:
    """Whether most of the window's pairs of steps go up (Kendall's tau over 0.5): a trend, not a jump and back."""
    recent = values[-window:]
    pairs = [(b > a) - (b < a) for i, a in enumerate(recent) for b in recent[i + 1 :]]
    return bool(pairs) and sum(pairs) / len(pairs) > 0.5


def _non_finite(history: Sequence[Row], guards: StepGuards) -> Iterator[Firing]:
    """The optimizer leaves such an update out: one costs a step, but steps in a row will not mend themselves."""
    in_a_row = sum(1 for _ in itertools.takewhile(_not_finite, reversed(history)))
    lasting = in_a_row >= guards.non_finite_limit and guards.non_finite in ("warn", "skip")
    for metric, value in _not_finite(history[-1]).items():
        what = f"{metric} is {value}" + (f", and {in_a_row} steps in a row are like it" if lasting else "")
        yield Firing("non_finite", "stop" if lasting else guards.non_finite, what, {"value": value})


def _not_finite(row: Row) -> dict[str, float]:
    """Loss and gradient norm, where they are not finite."""
    values = {metric: row.get(metric) for metric in ("train/loss", GRAD_NORM)}
    return {metric: value for metric, value in values.items() if value is not None and not math.isfinite(value)}


def _grad_norm_spike(history: Sequence[Row], guards: StepGuards) -> Iterator[Firing]:
    *earlier, last = _values(history, GRAD_NORM) or [0.0]
    # Steps without any signal have a norm of 0 and say nothing about what is usual.
    usual = [value for value in earlier[-guards.window :] if value > 0]
    if len(usual) >= MIN_HISTORY and last > guards.grad_norm_spike_factor * median(usual):
        numbers = {"value": last, "median": median(usual)}
        message = f"gradient norm {last:.3g} is {last / median(usual):.1f} times its running median"
        yield Firing("grad_norm_spike", guards.grad_norm_spike, message, numbers)


def _reward_collapse(history: Sequence[Row], guards: StepGuards) -> Iterator[Firing]:
    """A fall from the best steps that is large (the configured share) and that chance does not explain.

    Chance is told from the batches themselves: the prompts of a batch are drawn at random, and the standard error over
    its groups says how far its mean may lie from that of others. Where most batches have none, being of one group, it
    is told from the scatter of their means, and the fall from a whole window: three single prompts say too little.
    """
    trained = [row for row in history if _values([row], REWARD)]
    judged = [row for row in trained if _values([row], REWARD_ERROR)]
    knows_error = 2 * len(judged) > len(trained)
    values = _values(judged if knows_error else trained, REWARD)
    part = max(3, guards.window // 3) if knows_error else guards.window
    if len(values) < max(2 * part, 3):
        return
    # A young run has no whole window yet, and can collapse all the same.
    size = guards.window if len(values) >= 2 * guards.window else part
    best = max(fmean(values[i : i + size]) for i in range(len(values) - size))
    recent = fmean(values[-part:])
    # Rewards may be negative: the fall is measured from the level of the worst step.
    allowed = (1 - guards.reward_collapse_ratio) * (best - min(0.0, *values))
    # Of all batches alike: a batch of nought alone looks as if it were certain of it.
    variance = fmean(value**2 for value in _values(judged, REWARD_ERROR)) if knows_error else _scatter(values)
    error = math.sqrt(variance * (1 / size + 1 / part))
    if best - recent > max(allowed, CHANCE_SIGMAS * error):
        message = f"mean reward fell to {recent:.3f} from {best:.3f} in its best {size} steps (by chance ± {error:.3f})"
        yield Firing(
            "reward_collapse", guards.reward_collapse, message, {"value": recent, "best": best, "error": error}
        )


def _scatter(values: Sequence[float]) -> float:
    """Variance of the single values from step to step, which a trend or one fall hardly touches (von Neumann 1941)."""
    return fmean((after - before) ** 2 for before, after in itertools.pairwise(values)) / 2


def _entropy_rise(history: Sequence[Row], guards: StepGuards) -> Iterator[Firing]:
    values = _values(history, ENTROPY)
    ends = _ends(values, guards.window)
    if ends and ends[1] > guards.entropy_rise_factor * max(ends[0], ENTROPY_FLOOR) and _rises(values, guards.window):
        yield _trend("entropy_rise", guards.entropy_rise, "entropy rose", ends, guards.window)


def _entropy_collapse(history: Sequence[Row], guards: StepGuards) -> Iterator[Firing]:
    values = _values(history, ENTROPY)
    ends = _ends(values, guards.window)
    falls = _rises([-value for value in values], guards.window)
    if ends and ends[0] > ENTROPY_FLOOR and ends[1] < guards.entropy_collapse_factor * ends[0] and falls:
        yield _trend("entropy_collapse", guards.entropy_collapse, "entropy fell", ends, guards.window)


def _logprob_mismatch(history: Sequence[Row], guards: StepGuards) -> Iterator[Firing]:
    values = _values(history, MISMATCH)
    ends = _ends(values, guards.window)
    if (
        ends
        and ends[1] > guards.logprob_mismatch_factor * max(ends[0], MISMATCH_FLOOR)
        and _rises(values, guards.window)
    ):
        what = "the train/rollout log-prob difference rose"
        yield _trend("logprob_mismatch", guards.logprob_mismatch, what, ends, guards.window)


def _mismatch_after_resume(history: Sequence[Row], guards: StepGuards, resumed_at: int) -> Iterator[Firing]:
    split = sum(row.get("step", math.inf) < resumed_at for row in history)
    before = _values(history[:split], MISMATCH)[-guards.window :]
    after = _values(history[split:], MISMATCH)
    if len(before) < MIN_HISTORY or not after or len(after) > guards.window:
        return
    usual = max(median(before), MISMATCH_FLOOR)
    if after[-1] > guards.logprob_mismatch_factor * usual:
        numbers = {"value": after[-1], "before": median(before), "resumed_at": float(resumed_at)}
        message = (
            f"the train/rollout log-prob difference is {after[-1]:.3g} after a resume, {median(before):.3g} before"
        )
        yield Firing("logprob_mismatch", guards.logprob_mismatch, message, numbers)


def _trend(name: str, action: Action, what: str, ends: tuple[float, float], window: int) -> Firing:
    numbers = {"first": ends[0], "last": ends[1], "window": float(window)}
    return Firing(name, action, f"{what} from {ends[0]:.3g} to {ends[1]:.3g} in {window} steps", numbers)
