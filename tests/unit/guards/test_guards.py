"""Guards on curves of runs that failed, and of runs that did not."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any

import pytest

from colocate_grpo.config import RolloutGuards, StepGuards
from colocate_grpo.observe.guards import Firing, check_rollout, check_step
from colocate_grpo.rollout.statistics import standard_error


def rows(**curves: list[float]) -> list[dict[str, Any]]:
    """Metric rows from curves; `a__b` stands for `a/b`."""
    columns = [(name.replace("__", "/"), values) for name, values in curves.items()]
    steps = range(len(columns[0][1]))
    return [{"step": step, **{metric: values[step] for metric, values in columns}} for step in steps]


def rewards(values: list[float], error: float) -> list[dict[str, Any]]:
    """Rows of mean rewards that are all known to `error`."""
    return rows(rollout__raw_reward=values, rollout__raw_reward__stderr=[error] * len(values))


def batch(draw: random.Random, mean: float) -> dict[str, Any]:
    """The row of 4 prompts with 4 answers each, of which `mean` are right on average."""
    skills = [draw.betavariate(mean, 1 - mean) for _ in range(4)]
    means = [sum(draw.random() < skill for _ in range(4)) / 4 for skill in skills]
    return {"rollout/raw_reward": fmean(means), "rollout/raw_reward/stderr": standard_error(means)}


def single(draw: random.Random, mean: float) -> dict[str, Any]:
    """The row of one prompt with 8 answers, which knows of no other prompts."""
    skill = draw.betavariate(mean, 1 - mean)
    return {"rollout/raw_reward": sum(draw.random() < skill for _ in range(8)) / 8}


def first_firing(history: list[dict[str, Any]], **options: Any) -> tuple[int, Firing] | None:
    """Step and firing of the first guard that fires as the run goes on."""
    for end in range(1, len(history) + 1):
        for firing in check_step(history[:end], StepGuards(**options)):
            return end - 1, firing
    return None


def test_entropy_that_rises_from_0_66_to_1_82_in_14_steps_is_caught_before_the_end() -> None:
    history = rows(train__entropy_loss=[0.66, 0.67, 0.66, 0.65] + [0.66 * (1.82 / 0.66) ** (i / 14) for i in range(15)])
    fired = first_firing(history, entropy_rise="rollback")
    assert fired is not None
    step, firing = fired
    assert firing.name == "entropy_rise"
    assert firing.action == "rollback"
    assert step < 4 + 14
    assert firing.numbers["last"] > 1.5 * firing.numbers["first"]


def test_entropy_collapse() -> None:
    fired = first_firing(rows(train__entropy_loss=[0.5] * 5 + [0.5 * 0.7**i for i in range(15)]))
    assert fired is not None
    assert fired[1].name == "entropy_collapse"


def test_a_healthy_noisy_run_is_left_alone() -> None:
    noise = random.Random(1)
    steps = 200
    history = rows(
        rollout__raw_reward=[0.25 + 0.65 * (1 - math.exp(-i / 30)) + noise.gauss(0, 0.04) for i in range(steps)],
        rollout__raw_reward__stderr=[0.04] * steps,
        train__entropy_loss=[(0.1 + 0.5 * math.exp(-i / 40)) * noise.uniform(0.8, 1.2) for i in range(steps)],
        train__train_rollout_logprob_abs_diff=[0.012 * noise.uniform(0.7, 1.4) for _ in range(steps)],
        train__grad_norm=[0.2 * math.exp(noise.gauss(0, 0.5)) for _ in range(steps)],
        train__loss=[noise.gauss(0, 0.01) for _ in range(steps)],
    )
    assert first_firing(history) is None
    for resumed_at in (20, 100):
        assert check_step(history[: resumed_at + 1], StepGuards(), resumed_at) == []


@pytest.mark.parametrize("level", [(0.8, 0.1), (0.5, -0.9)], ids=["zero_to_one", "minus_one_to_one"])
def test_reward_collapse(level: tuple[float, float]) -> None:
    high, low = level
    fired = first_firing(rewards([high] * 25 + [low] * 5, error=0.05))
    assert fired is not None
    step, firing = fired
    assert firing.name == "reward_collapse"
    assert 25 <= step <= 27
    assert firing.numbers["error"] == pytest.approx(0.05 * math.sqrt(1 / 10 + 1 / 3))


def test_a_fall_that_chance_explains_is_none() -> None:
    """0.8 to 0.1 in batches of three prompts, of which 0.7 is about three standard errors."""
    assert first_firing(rewards([0.8] * 25 + [0.1] * 5, error=0.36)) is None
    assert first_firing(rewards([0.8] * 25 + [0.1] * 5, error=0.24)) is not None


@pytest.mark.parametrize("error", [{}, {"rollout/raw_reward/stderr": None}, {"rollout/raw_reward/stderr": math.nan}])
def test_batches_that_do_not_know_their_error_are_judged_by_their_scatter(error: dict[str, Any]) -> None:
    collapsed = [row | error for row in rows(rollout__raw_reward=[0.8] * 25 + [0.0] * 15)]
    fired = first_firing(collapsed)
    assert fired is not None
    assert fired[1].name == "reward_collapse"
    assert 25 <= fired[0] <= 35


def test_a_single_batch_without_its_error_changes_nothing() -> None:
    history = rewards([0.8] * 25 + [0.1] * 5, error=0.05)
    history[7]["rollout/raw_reward/stderr"] = None
    fired = first_firing(history)
    assert fired is not None
    assert 25 <= fired[0] <= 27


@pytest.mark.parametrize("mean", [0.1, 0.25, 0.5, 0.7, 0.9])
def test_single_prompts_that_only_scatter_are_left_alone(mean: float) -> None:
    """8 answers to one prompt a step, at one level for 60 steps: at most 2 alarms in 40 runs."""
    draw = random.Random(5)
    alarms = sum(first_firing([single(draw, mean) for _ in range(60)]) is not None for _ in range(40))
    assert alarms <= 2


def test_a_collapse_shows_in_single_prompts_too() -> None:
    draw = random.Random(6)
    for _ in range(20):
        fired = first_firing([single(draw, 0.7) for _ in range(20)] + [single(draw, 0.02) for _ in range(20)])
        assert fired is not None
        assert 20 <= fired[0] <= 36


@pytest.mark.parametrize("mean", [0.05, 0.1, 0.25, 0.5, 0.9])
def test_small_batches_that_only_scatter_are_left_alone(mean: float) -> None:
    """4 prompts of very different difficulty, 4 answers each, at one level for 60 steps: at most 1 alarm in 40 runs."""
    draw = random.Random(3)
    alarms = sum(first_firing([batch(draw, mean) for _ in range(60)]) is not None for _ in range(40))
    assert alarms <= 1


def test_a_collapse_shows_in_small_batches_too() -> None:
    draw = random.Random(4)
    for _ in range(20):
        fired = first_firing([batch(draw, 0.7) for _ in range(20)] + [batch(draw, 0.02) for _ in range(20)])
        assert fired is not None
        assert 20 <= fired[0] <= 26


def test_mismatch_as_a_trend_and_after_a_resume() -> None:
    drift = rows(train__train_rollout_logprob_abs_diff=[0.01] * 5 + [0.01 * 1.25**i for i in range(15)])
    fired = first_firing(drift)
    assert fired is not None
    assert fired[1].name == "logprob_mismatch"
    jump = rows(train__train_rollout_logprob_abs_diff=[0.01] * 20 + [0.05])
    assert check_step(jump, StepGuards()) == [], "a single jump is no trend"
    [firing] = check_step(jump, StepGuards(), resumed_at=20)
    assert firing.numbers == {"value": 0.05, "before": 0.01, "resumed_at": 20.0}
    jump[-1].pop("step")
    assert check_step(jump, StepGuards(), resumed_at=20) == [firing], "the row of the step may have no number yet"


def test_rounding_errors_of_an_exact_engine_are_no_mismatch() -> None:
    tiny = rows(train__train_rollout_logprob_abs_diff=[1e-7 * 1.5**i for i in range(20)])
    assert first_firing(tiny) is None


def test_gradient_norm_spike_and_non_finite_values() -> None:
    norms = [0.2, 0.0, 0.3, 0.25, 0.2, 0.0, 0.22]
    assert first_firing(rows(train__grad_norm=norms)) is None
    fired = first_firing(rows(train__grad_norm=[*norms, 9.0]))
    assert fired is not None
    assert fired[1].name == "grad_norm_spike"
    for metric in ("train/loss", "train/grad_norm"):
        lost = [{"step": step, metric: math.nan} for step in range(3)]
        for count, action in ((1, "warn"), (2, "warn"), (3, "stop")):
            [firing] = check_step(lost[:count], StepGuards())
            assert (firing.name, firing.action) == ("non_finite", action)
        assert check_step([*lost[:2], {"step": 2, metric: 0.1}], StepGuards()) == []
        [firing] = check_step([lost[0], {"step": 1, metric: 0.1}, lost[2]], StepGuards(non_finite_limit=2))
        assert firing.action == "warn", "only in a row"
        assert check_step(lost, StepGuards(non_finite="off")) == []
        [firing] = check_step(lost, StepGuards(non_finite="rollback"))
        assert firing.action == "rollback"


def test_skipped_steps_do_not_count() -> None:
    skipped = {"rollout/raw_reward": 0.0, "rollout/raw_reward/stderr": 0.0, "train/skipped": 1.0}
    history = rewards([0.8] * 25, error=0.01) + [{"step": 25, **skipped}] * 5
    assert first_firing(history) is None


@pytest.mark.parametrize(
    ("metrics", "name", "action"),
    [
        ({"rollout/failed_ratio": 0.9, "rollout/raw_reward": 0.0}, "failed_ratio", "skip"),
        ({"rollout/truncated_ratio": 0.95}, "truncated_ratio", "warn"),
        ({"rollout/repetition_frac": 0.6}, "repetition", "warn"),
        ({"rollout/zero_variance_ratio": 1.0, "rollout/raw_reward": 0.0}, "equal_rewards", "warn"),
    ],
)
def test_rollout_guards(metrics: dict[str, float], name: str, action: str) -> None:
    [firing] = check_rollout(metrics, RolloutGuards())
    assert (firing.name, firing.action) == (name, action)
    assert firing.numbers
    assert check_rollout(metrics, RolloutGuards(**{name: "off"})) == []


def test_a_healthy_batch_passes() -> None:
    healthy = {
        "rollout/failed_ratio": 0.01,
        "rollout/truncated_ratio": 0.3,
        "rollout/repetition_frac": 0.02,
        "rollout/zero_variance_ratio": 0.6,
        "rollout/raw_reward": 0.5,
    }
    assert check_rollout(healthy, RolloutGuards()) == []
