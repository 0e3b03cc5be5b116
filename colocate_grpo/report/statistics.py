"""Uncertainty of pass@1: problems are the clusters, samples of one problem are not independent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from colocate_grpo.rollout.statistics import standard_error

CONFIDENCE = 0.95
# Where fewer problems differ from the rest, their scatter says nothing: often it is that of none at all.
FEW = 5


@dataclass(frozen=True)
class Interval:
    """A value with its standard error and its 95 % interval."""

    value: float
    stderr: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def pass_at_1(problem_means: Sequence[float] | np.ndarray) -> Interval:
    """pass@1 over problems drawn at random, each given by the mean of its samples.

    The standard error is that of the mean of the problems, whatever the number of samples.
    """
    means = np.asarray(problem_means, dtype=float)
    assert means.size > 0, "no problems"
    value, stderr = float(means.mean()), standard_error(means.tolist())
    return Interval(value, stderr, *interval_of_mean(value, stderr, means.size))


def interval_of_mean(value: float, stderr: float, problems: int) -> tuple[float, float]:
    """95 % interval of a mean over `problems` clusters.

    Of a rate in [0, 1] it is Wilson's, with the effective number of observations p(1-p)/stderr^2 and Student's t:
    it stays inside [0, 1] and keeps its coverage near the ends, where p +- 2 stderr does not. Where all problems
    agree on 0 or 1, the number of problems takes the place of the effective number. Other means (a reward may lie
    anywhere) get Student's t.
    """
    if problems < 2:
        return -math.inf, math.inf
    if not 0.0 <= value <= 1.0:
        half = student_t(problems - 1) * stderr
        return value - half, value + half
    observations = value * (1.0 - value) / stderr**2 if stderr > 0 else float(problems)
    weight = student_t(problems - 1) ** 2 / max(observations, 1e-9)
    centre = (value + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (value * (1 - value) + weight / 4)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(before: Mapping[str, float], after: Mapping[str, float]) -> Interval:
    """Mean of `after - before` over the problems that both have, with Student's t over the problems.

    Where (nearly) all problems agree, that would be an interval of (nearly) no width, as if no problem could ever
    differ. There it is Bonett and Price's (2012, J. Educ. Behav. Stat. 37:479), which reckons with one more problem
    won and one more lost: of `n` problems that all agree about +- 2.8 / n, as the rule of three has it (3 / n).
    """
    differences = _differences(before, after)
    value, stderr = float(differences.mean()), standard_error(differences.tolist())
    if len(differences) < 2:
        return Interval(value, stderr, -math.inf, math.inf)
    if not differ_rarely(before, after):
        half = student_t(len(differences) - 1) * stderr
        return Interval(value, stderr, value - half, value + half)
    reach = max(1.0, float(np.abs(differences).max()))
    padded = np.append(differences, [reach, -reach])
    middle, half = float(padded.mean()), student_t(len(differences) - 1) * float(padded.std()) / math.sqrt(len(padded))
    return Interval(value, stderr, max(-reach, middle - half), min(reach, middle + half))


def differ_rarely(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether all problems but a few changed by the same, mostly by nothing."""
    # The same change of two rates differs by their rounding.
    _, counts = np.unique(np.round(_differences(before, after), 9), return_counts=True)
    return int(counts.sum() - counts.max()) < FEW


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> np.ndarray:
    shared = sorted(before.keys() & after.keys())
    assert shared, "no problem in common"
    return np.array([after[problem] - before[problem] for problem in shared])


def unpaired_difference(before: Interval, after: Interval) -> Interval:
    """Difference of two rates measured on different problems (Newcombe's interval from the two single ones)."""
    value = after.value - before.value
    low = value - math.hypot(after.value - after.low, before.high - before.value)
    high = value + math.hypot(after.high - after.value, before.value - before.low)
    return Interval(value, math.hypot(before.stderr, after.stderr), low, high)


def sampling_noise(scores_by_problem: Mapping[str, Sequence[float]]) -> float:
    """Standard deviation of pass@1 when the same weights answer the same problems again; nan with one sample each."""
    variances = [np.var(scores, ddof=1) / len(scores) for scores in scores_by_problem.values() if len(scores) > 1]
    return math.sqrt(sum(variances)) / len(variances) if variances else math.nan


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Two-sided quantile of Student's t (exact for 1 and 2 degrees of freedom, else to 3 digits; Hill 1970)."""
    tail = (1 + confidence) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z, n = NormalDist().inv_cdf(tail), freedom
    terms = [
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    ]
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))


def expected_maximum(evaluations: int, noise: float) -> float:
    """How far the best of `evaluations` equal models lies above the truth by sampling noise alone (Blom 1958)."""
    return noise * NormalDist().inv_cdf((evaluations - 0.375) / (evaluations + 0.25)) if evaluations > 1 else 0.0
