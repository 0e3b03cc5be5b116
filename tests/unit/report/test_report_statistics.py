"""Intervals: published examples, hand-computed values, and their coverage in simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from colocate_grpo.report.statistics import (
    Interval,
    expected_maximum,
    interval_of_mean,
    paired_difference,
    pass_at_1,
    sampling_noise,
    standard_error,
    student_t,
    unpaired_difference,
)

SIMULATIONS = 2000
# (problems, samples, a, b): problems are as easy as Beta(a, b) says.
WORLDS = [(30, 16, 2, 2), (30, 16, 0.5, 0.5), (30, 1, 2, 2), (500, 1, 5, 5), (100, 4, 1, 9), (256, 4, 8, 2)]


@pytest.mark.parametrize(("problems", "samples", "a", "b"), WORLDS)
def test_intervals_cover_the_truth(problems: int, samples: int, a: float, b: float) -> None:
    generator = np.random.default_rng(0)
    truth, gain = a / (a + b), 0.3 * (1 - a / (a + b))
    hits = {"pass@1": 0, "paired": 0, "unpaired": 0}
    for _ in range(SIMULATIONS):
        skill = generator.beta(a, b, problems)
        before = generator.binomial(samples, skill) / samples
        after = generator.binomial(samples, skill + 0.3 * (1 - skill)) / samples
        other_skill = generator.beta(a, b, problems)
        other = generator.binomial(samples, other_skill + 0.3 * (1 - other_skill)) / samples
        hits["pass@1"] += _covers(pass_at_1(before), truth)
        hits["paired"] += _covers(paired_difference(_named(before), _named(after)), gain)
        hits["unpaired"] += _covers(unpaired_difference(pass_at_1(before), pass_at_1(other)), gain)
    assert all(0.93 <= count / SIMULATIONS <= 0.97 for count in hits.values()), hits


def test_near_the_ends_the_interval_neither_collapses_nor_leaves_the_range() -> None:
    """Of 30 problems solved with chance 0.05, p +- 2 standard errors covers the truth in fewer than 8 of 10 cases."""
    generator = np.random.default_rng(1)
    intervals = [pass_at_1(generator.binomial(1, 0.05, 30).astype(float)) for _ in range(SIMULATIONS)]
    assert all(0.0 <= i.low <= i.value <= i.high <= 1.0 for i in intervals)
    assert 0.93 <= np.mean([_covers(i, 0.05) for i in intervals]) <= 0.97


def test_the_standard_error_is_clustered_by_problem() -> None:
    """Two problems, one always and one never solved: 16 samples each say no more than one each."""
    assert pass_at_1([1.0, 0.0]).stderr == pytest.approx(0.5)
    # 0.25, 0.5, 0.75: variance 0.0625, over 3 problems.
    assert standard_error([0.25, 0.5, 0.75]) == pytest.approx(math.sqrt(0.0625 / 3))


def test_wilsons_interval_of_a_published_example() -> None:
    """81 of 263 (Newcombe 1998, Statistics in Medicine 17:857, table I): 0.2553 to 0.3662."""
    outcomes = [1.0] * 81 + [0.0] * 182
    interval = pass_at_1(outcomes)
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=0.001)


def test_the_interval_of_a_difference_of_a_published_example() -> None:
    """56/70 - 48/80 (Newcombe 1998, Statistics in Medicine 17:873, table II, method 10): 0.0524 to 0.3339."""
    first, second = pass_at_1([1.0] * 48 + [0.0] * 32), pass_at_1([1.0] * 56 + [0.0] * 14)
    interval = unpaired_difference(first, second)
    assert interval.value == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((0.0524, 0.3339), abs=0.004)


def test_pairing_by_problem_takes_away_what_the_problems_have_in_common() -> None:
    before = {str(i): i / 10 for i in range(9)}
    after = {problem: value + (0.05, 0.1, 0.15)[i % 3] for i, (problem, value) in enumerate(before.items())}
    paired = paired_difference(before, after | {"only here": 0.0})
    # Three each of -0.05, 0 and 0.05 around the mean: variance 0.015 / 8, over 9 problems.
    assert (paired.value, paired.stderr) == (pytest.approx(0.1), pytest.approx(math.sqrt(0.015 / 8 / 9)))
    unpaired = unpaired_difference(pass_at_1(list(before.values())), pass_at_1(list(after.values())))
    assert unpaired.includes_zero
    assert not paired.includes_zero


@pytest.mark.parametrize("change", [0.0, 0.1, -1.0])
@pytest.mark.parametrize("problems", [2, 10, 30, 500])
def test_problems_that_all_agree_still_leave_a_width(problems: int, change: float) -> None:
    before = {str(i): (0.1 if change > 0 else 1.0) + i / 1e4 * (change > 0) for i in range(problems)}
    interval = paired_difference(before, {problem: value + change for problem, value in before.items()})
    assert interval.value == pytest.approx(change)
    assert -1.0 <= interval.low <= interval.value + 1e-9
    assert interval.value - 1e-9 <= interval.high <= 1.0
    assert interval.high - interval.low > 2 / problems
    if change == 0.0 and problems >= 30:  # the rule of three: 3 / n in each direction
        assert (-interval.low, interval.high) == pytest.approx((3 / problems, 3 / problems), rel=0.1)


# (problems, samples, share of problems that differ, share of those that are won)
@pytest.mark.parametrize("world", [(30, 1, 0.01, 1), (30, 1, 0.08, 0.5), (30, 16, 0.08, 0.7), (100, 4, 0.02, 1),
                                   (500, 1, 0.01, 0.7), (5, 1, 0.3, 0.7)])  # fmt: skip
def test_where_few_problems_differ_the_interval_covers_the_truth(world: tuple[int, int, float, float]) -> None:
    """Student's t over the problems covers it in 27 of 100 simulations of the first world, in 87 of the third."""
    problems, samples, differs, won = world
    generator = np.random.default_rng(4)
    mean_size = 1.0 if samples == 1 else 0.5
    hits = 0
    for _ in range(SIMULATIONS):
        size = generator.binomial(samples, mean_size, problems) / samples
        sign = np.where(generator.random(problems) < won, 1, -1)
        change = size * sign * (generator.random(problems) < differs)
        hits += _covers(
            paired_difference(_named(np.zeros(problems)), _named(change)), differs * (2 * won - 1) * mean_size
        )
    assert hits / SIMULATIONS >= 0.93


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045), (120, 1.980)],
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=0.0015)


def test_all_right_and_all_wrong_still_have_a_width() -> None:
    assert pass_at_1([0.0] * 30).high == pytest.approx(0.122, abs=0.005)
    assert pass_at_1([1.0] * 30).low == pytest.approx(0.878, abs=0.005)


def test_one_problem_says_nothing_about_others() -> None:
    interval = pass_at_1([0.5])
    assert math.isnan(interval.stderr)
    assert (interval.low, interval.high) == (-math.inf, math.inf)


def test_a_reward_outside_of_0_and_1_gets_a_symmetric_interval() -> None:
    low, high = interval_of_mean(-0.5, 0.1, 11)
    assert (low, high) == (pytest.approx(-0.5 - 0.2228, abs=1e-3), pytest.approx(-0.5 + 0.2228, abs=1e-3))


def test_sampling_noise_is_the_spread_of_repeated_evaluations() -> None:
    generator = np.random.default_rng(2)
    skill = generator.beta(2, 2, 40)

    def evaluate() -> np.ndarray:
        return generator.binomial(1, np.repeat(skill[:, None], 8, axis=1)).astype(float)

    spread = np.std([evaluate().mean() for _ in range(SIMULATIONS)])
    estimates = [sampling_noise({str(i): list(row) for i, row in enumerate(evaluate())}) for _ in range(50)]
    assert np.mean(estimates) == pytest.approx(spread, rel=0.06)
    assert math.isnan(sampling_noise({"a": [1.0], "b": [0.0]}))


def test_the_best_of_several_equal_models_is_too_good_by_chance() -> None:
    generator = np.random.default_rng(3)
    for evaluations in (2, 6, 20):
        best = generator.normal(0.0, 0.03, (20000, evaluations)).max(axis=1).mean()
        assert expected_maximum(evaluations, 0.03) == pytest.approx(best, rel=0.05)
    assert expected_maximum(1, 0.03) == 0.0


def _named(values: np.ndarray) -> dict[str, float]:
    return {str(i): float(value) for i, value in enumerate(values)}


def _covers(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high
