"""Packing: nothing lost, few bins, even shares, fast. Two lists of 256 lengths shaped like a real run's."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate_grpo.train.packing import CostModel, imbalance, pack, plan
from colocate_grpo.train.shape import ModelShape

LISTS = json.loads((Path(__file__).parent / "lengths.json").read_text())
QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
COST = CostModel.of(ModelShape.from_hf(QWEN3_4B))


def loads(lengths: list[int], shares: list[list[list[int]]], cost: CostModel) -> list[float]:
    return [sum(cost(lengths[i]) for micro in share for i in micro) for share in shares]


def fewest(lengths: list[int], cap: int) -> int:
    """No packing has fewer bins: neither the tokens nor the items over half a bin fit into less."""
    return max(math.ceil(sum(lengths) / cap), sum(length > cap / 2 for length in lengths))


@pytest.mark.parametrize(("name", "mean", "at_limit"), [("early", 4480, 0.21), ("late", 6400, 0.46)])
def test_lists_have_the_shape_they_claim(name: str, mean: int, at_limit: float) -> None:
    lengths = LISTS[name]
    assert len(lengths) == 256
    assert sum(lengths) / 256 == pytest.approx(mean, rel=0.02)
    assert sum(length == 8192 for length in lengths) / 256 == pytest.approx(at_limit, abs=0.01)


@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize("cap", [4096, 8704])
def test_reference_lists(name: str, cap: int) -> None:
    lengths = LISTS[name]
    shares = plan(lengths, cap, 2, COST)
    assert sorted(i for share in shares for micro in share for i in micro) == list(range(256))
    assert sum(map(len, shares)) <= 1.02 * fewest(lengths, cap)
    assert imbalance(loads(lengths, shares, COST)) <= 0.01


@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize("cap", [4096, 8704])
def test_a_plan_is_a_matter_of_milliseconds(name: str, cap: int) -> None:
    """At most as long as 350 sorts, which take some 10 ms. A pause of the interpreter or of the machine only adds."""
    lengths = LISTS[name]

    def sort() -> None:
        for i in range(350):
            sorted(range(256), key=lambda k: lengths[(k * 7 + i) % 256])

    best = {"plan": math.inf, "sort": math.inf}
    for _ in range(5):
        for work, run in (("plan", lambda: plan(lengths, cap, 2, COST)), ("sort", sort)):
            started = time.thread_time()
            run()
            best[work] = min(best[work], time.thread_time() - started)
    print({work: f"{1000 * seconds:.2f} ms" for work, seconds in best.items()})
    assert best["plan"] < best["sort"]


lengths_of_a_batch = st.lists(st.integers(1, 3000), max_size=80)


@given(lengths_of_a_batch, st.integers(64, 4096), st.integers(1, 4))
def test_everything_is_packed_once_and_within_the_cap(lengths: list[int], cap: int, dp: int) -> None:
    shares = plan(lengths, cap, dp, CostModel(1e-4))
    assert len(shares) == dp
    micros = [micro for share in shares for micro in share]
    assert sorted(i for micro in micros for i in micro) == list(range(len(lengths)))
    for micro in micros:
        assert len(micro) == 1 or sum(lengths[i] for i in micro) <= cap


@given(lengths_of_a_batch, st.integers(64, 4096))
def test_no_two_bins_could_be_one(lengths: list[int], cap: int) -> None:
    sums = sorted(sum(lengths[i] for i in members) for members in pack(lengths, cap))
    assert len(sums) < 2 or sums[0] + sums[1] > cap


@given(lengths_of_a_batch, st.integers(2, 4))
def test_no_rank_is_dearer_than_the_next_by_more_than_one_bin(lengths: list[int], dp: int) -> None:
    """A bound that dealing out the dearest bins first keeps, and that the swaps may only improve."""
    cost = CostModel(1e-4)
    shares = plan(lengths, 4096, dp, cost)
    found = loads(lengths, shares, cost)
    dearest = max((sum(cost(lengths[i]) for i in micro) for share in shares for micro in share), default=0.0)
    assert max(found) - min(found) <= dearest * (1 + 1e-9)


def test_cost_is_the_share_of_attention() -> None:
    """Qwen3-4B: a token at 8,192 tokens costs about 1.3 times a first one (causal attention against 4 G products)."""
    assert COST(8192) / 8192 == pytest.approx(1 + 36 * 32 * 128 * 8192 / 4.02e9, rel=0.01)
