"""Numbers as text."""

from __future__ import annotations

import math

import pytest

from colocate_grpo.report.markdown import code, duration, number, percent, points, step_ranges


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (math.nan, "–"), (0.0, "0"), (7400.0, "7,400"), (6403.4, "6,403"), (0.5349, "0.535"),
        (0.05, "0.0500"), (12.34, "12.3"), (-3.5, "−3.50"), (1e-6, "1.00e−06"), (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_and_differences() -> None:
    assert (percent(0.575), percent(None)) == ("57.5 %", "–")
    assert (points(0.0751), points(-0.002)) == ("+7.5", "−0.2")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-4, "< 1 ms"),
        (0.5, "0.500 s"),
        (90.0, "90 s"),
        (150.0, "2.5 min"),
        (167760.0, "46.6 h"),
        (2e5, "2.3 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranges_of_steps() -> None:
    assert step_ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert step_ranges([]) == ""


def test_a_fence_is_longer_than_any_inside() -> None:
    assert code("a ```` b").splitlines() == ["`````", "a ```` b", "`````"]
