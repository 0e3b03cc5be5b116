"""Losses, KL estimators, corrections and aggregations against values worked out by hand, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from colocate_grpo.algorithm.correction import correction_weight
from colocate_grpo.algorithm.loss import (
    Denominators,
    cispo,
    clipped_surrogate,
    kl,
    policy_loss,
    sequence_log_ratio,
)
from colocate_grpo.config import AlgorithmConfig

LN2 = math.log(2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def surrogate(ratio: float, advantage: float, dual: float | None = None) -> tuple[float, bool, float]:
    """(loss, clipped, d loss / d log p) of one token."""
    log_ratio = tensor(math.log(ratio)).requires_grad_()
    result = clipped_surrogate(log_ratio, tensor(advantage), 0.2, 0.28, dual)
    result.loss.sum().backward()
    assert log_ratio.grad is not None
    return result.loss.item(), bool(result.clipped), log_ratio.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.2, 1.0, -1.2, False, -1.2),
        (1.5, 1.0, -1.28, True, 0.0),  # over 1 + clip_high
        (0.5, 1.0, -0.5, False, -0.5),  # below, but the advantage pulls back
        (0.5, -1.0, 0.8, True, 0.0),  # under 1 - clip_low
        (1.5, -1.0, 1.5, False, 1.5),
        (1.28 + 1e-9, 0.0, 0.0, False, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, clipped: bool, gradient: float) -> None:
    found = surrogate(ratio, advantage)
    assert found[0] == pytest.approx(loss)
    assert found[1] == clipped
    assert found[2] == pytest.approx(gradient)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only() -> None:
    assert surrogate(5.0, -1.0)[0] == pytest.approx(5.0)
    assert surrogate(5.0, -1.0, dual=3.0) == pytest.approx((3.0, True, 0.0))
    assert surrogate(5.0, 1.0, dual=3.0)[0] == pytest.approx(-1.28)


@pytest.mark.parametrize("ratio", ["token", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_an_overflowing_ratio_leaves_loss_and_gradient_finite(ratio: str, advantage: float) -> None:
    for log_ratio in (89.0, 1e4, -1e4):
        old = torch.tensor([-1e5], requires_grad=False)
        logprob = (old + log_ratio).requires_grad_()
        advantages, sequence = torch.tensor([advantage]), torch.tensor([0])
        result = policy_loss(AlgorithmConfig(ratio=ratio), logprob, old, advantages, sequence)
        result.loss.sum().backward()
        assert logprob.grad is not None
        assert result.loss.isfinite().all()
        assert logprob.grad.isfinite().all()
        if ratio != "cispo" and (advantage == 0.0 or (advantage > 0) == (log_ratio > 0)):
            assert logprob.grad.item() == 0.0, "clipped, or nothing to learn"
        reference = torch.tensor([0.0])
        for estimator in ("k1", "k2", "k3"):
            policy = torch.tensor([-log_ratio], requires_grad=True)
            kl(estimator, policy, reference).sum().backward()
            assert policy.grad is not None
            assert policy.grad.isfinite().all()


def test_ratios_of_policies_that_are_near_are_what_they_were() -> None:
    log_ratio = torch.linspace(-19.9, 19.9, 4001)
    result = clipped_surrogate(log_ratio, torch.full_like(log_ratio, -1.0), 0.2, 0.28, None)
    ratio = log_ratio.exp()
    assert torch.equal(result.loss, torch.maximum(ratio, ratio.clamp(0.8, 1.28)))
    assert torch.equal(kl("k3", -log_ratio, torch.zeros_like(log_ratio)), torch.expm1(log_ratio) - log_ratio)


def test_gspo_ratio_is_the_geometric_mean_of_the_sequence() -> None:
    logprob = tensor(-1.0, -2.0, -3.0, -4.0).requires_grad_()
    old = tensor(-1.0 - LN2, -2.0, -3.0, -4.0 - 3 * LN2)
    sequence = torch.tensor([0, 0, 1, 1])
    log_ratio = sequence_log_ratio(logprob, old, sequence)
    assert log_ratio.tolist() == pytest.approx([LN2 / 2, LN2 / 2, 1.5 * LN2, 1.5 * LN2])
    # GSPO's gradient (eq. 10): s_i * A / |y_i| on every token when the token losses are averaged over the sequence.
    (-(log_ratio.exp())[:2].mean()).backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([-math.sqrt(2) / 2, -math.sqrt(2) / 2, 0.0, 0.0])


def test_gspo_clips_whole_sequences() -> None:
    config = AlgorithmConfig(ratio="gspo", clip_low=0.2, clip_high=0.28)
    logprob, old = tensor(0.0, -1.0, -1.0), tensor(-2 * LN2, -1.0, -1.0)
    result = policy_loss(config, logprob, old, tensor(1, 1, 1), torch.tensor([0, 0, 1]))
    assert result.loss.tolist() == pytest.approx([-1.28, -1.28, -1.0])
    assert result.clipped.tolist() == [True, True, False]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logprob = tensor(-1.0, -1.0).requires_grad_()
    result = cispo(logprob, tensor(-1.0 - LN2, -1.0), tensor(2.0, -1.0), 0.2, 0.28)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([1.28 * 2.0 * 1.0, -1.0])
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([-1.28 * 2.0, 1.0])
    assert result.clipped.tolist() == [True, False]


def test_kl_estimators() -> None:
    logprob, reference = tensor(math.log(0.5)), tensor(math.log(0.25))
    assert kl("k1", logprob, reference).item() == pytest.approx(LN2)
    assert kl("k2", logprob, reference).item() == pytest.approx(LN2**2 / 2)
    assert kl("k3", logprob, reference).item() == pytest.approx(0.5 - 1 + LN2)


def test_k1_and_k3_have_the_mean_of_the_exact_kl() -> None:
    p, q = tensor(0.7, 0.2, 0.1), tensor(0.2, 0.3, 0.5)
    exact = (p * (p / q).log()).sum().item()
    for name in ("k1", "k3"):
        assert (p * kl(name, p.log(), q.log())).sum().item() == pytest.approx(exact)


def test_corrections() -> None:
    train, rollout = tensor(0.0, 0.0, 0.0, 0.0), -tensor(1.0, 3.0, 0.25, 2.0).log()
    ratios = [1.0, 3.0, 0.25, 2.0]
    found = {n: correction_weight(n, train, rollout, 2.0, 0.5).tolist() for n in ("none", "tis", "mis", "icepop")}
    assert found["none"] == [1.0] * 4
    assert found["tis"] == pytest.approx([min(r, 2.0) for r in ratios])
    assert found["mis"] == pytest.approx([1.0, 0.0, 0.25, 2.0])
    assert found["icepop"] == pytest.approx([1.0, 0.0, 0.0, 2.0])


def test_no_gradient_flows_through_a_correction() -> None:
    train = tensor(0.5).requires_grad_()
    assert not correction_weight("tis", train, tensor(0.0), 2.0, 0.5).requires_grad


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("token_mean", [1 / 40, 1 / 40]), ("sequence_mean", [1 / 20, 1 / 60]), ("constant", [1 / 200, 1 / 200])],
)
def test_aggregations(aggregation: str, weights: list[float]) -> None:
    sizes = Denominators(tokens=40, sequences=2, max_tokens=100)
    assert [sizes.token_weight(aggregation, length) for length in (10, 30)] == pytest.approx(weights)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_empty_batch_is_no_division_by_zero(aggregation: str) -> None:
    assert math.isfinite(Denominators(0, 0, 100).token_weight(aggregation, 0))


@pytest.mark.parametrize("ratio", ["token", "gspo", "cispo"])
def test_no_tokens_is_no_loss(ratio: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    result = policy_loss(AlgorithmConfig(ratio=ratio), empty, empty, empty, torch.zeros(0, dtype=torch.long))
    assert result.loss.sum().item() == 0.0
