"""Values worked out by hand from the papers' formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate_grpo.algorithm.advantage import advantages

NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp")


def test_grpo_is_centred_and_over_the_unbiased_std() -> None:
    # mean 1/2, std sqrt(4 * 1/4 / 3) = 1/sqrt(3)
    expected = 0.5 * math.sqrt(3)
    assert advantages("grpo", [1, 0, 0, 1], [7, 7, 7, 7]) == pytest.approx(
        [expected, -expected, -expected, expected], rel=1e-5
    )


def test_dr_grpo_does_not_divide() -> None:
    assert advantages("dr_grpo", [1, 0, 0, 0], [0] * 4) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rloo_leaves_the_sample_itself_out() -> None:
    # 3 - (1 + 2)/2, 1 - (3 + 2)/2, 2 - (3 + 1)/2
    assert advantages("rloo", [3, 1, 2], [0, 0, 0]) == pytest.approx([1.5, -1.5, 0.0])


def test_reinforce_pp_divides_by_the_std_of_the_batch() -> None:
    # group means 1/2 and 3/2: differences +-1/2, +-1/2; their unbiased std is sqrt(1/3)
    found = advantages("reinforce_pp", [1, 0, 2, 1], [0, 0, 1, 1])
    assert found == pytest.approx([0.5 * math.sqrt(3), -0.5 * math.sqrt(3)] * 2, rel=1e-5)


def test_groups_may_have_any_size_and_be_interleaved() -> None:
    found = advantages("dr_grpo", [1, 5, 0, 7, 9], [0, 1, 0, 1, 1])
    assert found == pytest.approx([0.5, -2.0, -0.5, 0.0, 2.0])


def test_a_failed_member_is_left_out_and_gets_nothing() -> None:
    found = advantages("grpo", [1, None, 0], [0, 0, 0])
    assert found[1] == 0.0
    assert [found[0], found[2]] == advantages("grpo", [1, 0], [0, 0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("scores", "groups"),
    [([], []), ([1.0], [0]), ([0.3] * 5, [0] * 5), ([None, None], [0, 0]), ([1.0, None], [0, 0]), ([1, 0], [0, 1])],
)
def test_nothing_to_compare_is_zero(name: str, scores: list[float | None], groups: list[int]) -> None:
    assert advantages(name, scores, groups) == [0.0] * len(scores)


scores_and_groups = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(-10, 10, width=32)), st.integers(0, 4)), max_size=40
)


@given(scores_and_groups, st.sampled_from(NAMES))
def test_always_finite_and_centred_in_every_group(rows: list[tuple[float | None, int]], name: str) -> None:
    found = advantages(name, [s for s, _ in rows], [g for _, g in rows])
    assert all(math.isfinite(value) for value in found)
    for group in range(5):
        assert sum(v for v, (_, g) in zip(found, rows, strict=True) if g == group) == pytest.approx(0.0, abs=1e-4)


@given(scores_and_groups, st.randoms(use_true_random=False), st.sampled_from(NAMES))
def test_order_does_not_matter(rows: list[tuple[float | None, int]], rng, name: str) -> None:
    order = list(range(len(rows)))
    rng.shuffle(order)
    straight = advantages(name, [s for s, _ in rows], [g for _, g in rows])
    shuffled = advantages(name, [rows[i][0] for i in order], [rows[i][1] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-9)
