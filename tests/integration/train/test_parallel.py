"""Equal to transformers under every layout: forward, gradients, optimizer steps, invariance. No tolerance on the loss
alone: with ratio 1 it says nothing, so log-probs, entropy and gradients are compared everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1800)  # the first test of a world size waits for all of its checks
WORLDS = (1, 2, 4)
Results = Callable[[int], dict[str, Any]]


@pytest.mark.parametrize("world", WORLDS)
def test_forward_is_transformers(results: Results, world: int) -> None:
    for name, case in results(world)["parity"].items():
        assert case["logits"] <= 5e-6, name
        assert case["logprobs"] <= 5e-6, name
        assert abs(case["entropy"] - case["measured_entropy"]) <= 5e-6, name


@pytest.mark.parametrize("world", WORLDS)
def test_gradient_is_transformers(results: Results, world: int) -> None:
    for name, case in results(world)["parity"].items():
        assert case["norm"] > 0.1, name
        assert case["gradients"] <= 1e-5, name
        assert case["relative"] <= 1e-5, name
        assert case["loss"] <= 1e-5, name


@pytest.mark.parametrize("world", WORLDS)
def test_sequence_parallelism_really_shards(results: Results, world: int) -> None:
    assert all(case["sharded"] for case in results(world)["parity"].values())


@pytest.mark.parametrize("world", WORLDS)
def test_import_is_exact(results: Results, world: int) -> None:
    assert all(case["import_exact"] for case in results(world)["parity"].values())


@pytest.mark.parametrize("world", WORLDS)
def test_ten_steps_are_adamw(results: Results, world: int) -> None:
    """AdamW with weight decay on matrices only and clipping: the norm of every step agrees, so the weights do."""
    for name, case in results(world)["optimizer_steps"].items():
        assert len(case["norms"]) == 10
        assert max(case["norms"]) <= 1e-5, name
        assert max(case["losses"]) <= 1e-5, name


@pytest.mark.parametrize("world", WORLDS)
def test_gradient_does_not_depend_on_layout(results: Results, world: int) -> None:
    for name, case in results(world)["invariance"].items():
        assert case["relative"] <= 1e-5, name


@pytest.mark.parametrize("world", WORLDS)
def test_non_finite_gradient_skips_the_step(results: Results, world: int) -> None:
    for name, case in results(world)["non_finite"].items():
        assert case["skipped"] == 1.0, name
        assert case["untouched"], name
        assert 0 < case["next_norm"] < float("inf"), name


@pytest.mark.parametrize("kind", ["fp32", "masters", "stochastic"])
def test_checkpoint_continues_bit_for_bit(results: Results, kind: str) -> None:
    case = results(4)["saving"][kind]
    assert case["back"]
    assert case["again"]
    assert case["replicas"]


@pytest.mark.parametrize("world", WORLDS)
def test_checkpoint_loads_under_another_layout(results: Results, world: int) -> None:
    """Weights bit for bit, moments as sums, and the gradient norms of the next steps (the stochastic optimizer draws
    other numbers for other shards, so its second norm may drift a little)."""
    for name, case in results(world)["resharding"].items():
        assert case["weights"], name
        for found, saved in case["moments"]:
            assert found == pytest.approx(saved, rel=1e-9, abs=1e-12), name
        limits = {"fp32": (1e-5, 1e-5), "masters": (2e-2, 2e-2), "stochastic": (2e-2, 1e-1)}[name.split()[0]]
        for (found, saved), limit in zip(case["norms"], limits, strict=True):
            assert found == pytest.approx(saved, rel=limit), name


@pytest.mark.parametrize("world", WORLDS)
def test_every_parameter_has_its_own_clock_after_a_load(results: Results, world: int) -> None:
    """Megatron 0.16.1 gives all parameters one step tensor, which then advances once per parameter."""
    for name, case in results(world)["resharding"].items():
        assert case["clocks"] == [[1.0, 2.0, 2.0], [1.0, 4.0, 4.0]], name
