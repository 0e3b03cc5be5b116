"""The fused log-prob and entropy against log_softmax of full logits: values, gradients, temperature, memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from colocate_grpo.train.logprob import VocabShard, token_logprobs
from colocate_grpo.train.peak import peak_bytes

T, H, V, PADDED = 50, 16, 90, 128


def naive(hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float):
    log_p = F.log_softmax((hidden @ weight[:V].t()).float() / temperature, dim=-1)[rows]
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype: torch.dtype = torch.float32):
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, H, dtype=dtype, requires_grad=True)
    rows = torch.randperm(T)[:33].sort().values
    return hidden, weight, rows, torch.randint(0, V, (33,))


def shard(group: dist.ProcessGroup, chunk: int = 8, temperature: float = 1.0) -> VocabShard:
    return VocabShard(group, V, False, chunk, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 8, 33, 4096])
def test_values_and_gradients(alone: dist.ProcessGroup, chunk: int, temperature: float) -> None:
    hidden, weight, rows, targets = inputs()
    mix_logprob, mix_entropy = torch.randn(33), torch.randn(33)
    results = []
    for compute in (
        lambda: token_logprobs(hidden, weight, rows, targets, shard(alone, chunk, temperature)),
        lambda: naive(hidden, weight, rows, targets, temperature),
    ):
        logprob, entropy = compute()
        (logprob * mix_logprob + entropy * mix_entropy).sum().backward()
        results.append((logprob.detach(), entropy.detach(), hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_padding_has_no_probability_and_no_gradient(alone: dist.ProcessGroup) -> None:
    hidden, weight, rows, targets = inputs()
    with torch.no_grad():
        weight[V:] = 1e3  # would win every softmax
    logprob, entropy = token_logprobs(hidden, weight, rows, targets, shard(alone))
    (logprob + entropy).sum().backward()
    torch.testing.assert_close(logprob, naive(hidden, weight, rows, targets, 1.0)[0])
    assert weight.grad is not None
    assert not weight.grad[V:].any()
    assert weight.grad.isfinite().all()


def test_bf16_is_as_near_to_exact_as_the_naive_form(alone: dist.ProcessGroup) -> None:
    hidden, weight, rows, targets = inputs(torch.bfloat16)
    exact, _ = naive(hidden.double(), weight.double(), rows, targets, 1.0)
    rough, _ = naive(hidden, weight, rows, targets, 1.0)
    found, _ = token_logprobs(hidden, weight, rows, targets, shard(alone))
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 1.01 * (rough - exact).abs().max()


def test_weight_gradient_goes_to_main_grad_in_fp32(alone: dist.ProcessGroup) -> None:
    hidden, weight, rows, targets = inputs()
    token_logprobs(hidden, weight, rows, targets, shard(alone))[0].sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    token_logprobs(hidden, weight, rows, targets, shard(alone))[0].sum().backward()
    assert weight.grad is None
    assert expected is not None
    torch.testing.assert_close(weight.main_grad - 1.0, expected, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


def test_no_tokens(alone: dist.ProcessGroup) -> None:
    hidden, weight, _, _ = inputs()
    empty = torch.zeros(0, dtype=torch.long)
    logprob, entropy = token_logprobs(hidden, weight, empty, empty, shard(alone))
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_full_logits_never_exist(alone: dist.ProcessGroup) -> None:
    """16 chunks: the peak stays under a quarter of the full logits, which the naive form holds several times."""
    hidden = torch.randn(4096, 8, requires_grad=True)
    weight = torch.randn(8192, 8, requires_grad=True)
    rows, targets = torch.arange(4096), torch.randint(0, 8192, (4096,))

    def fused() -> None:
        logprob, entropy = token_logprobs(hidden, weight, rows, targets, VocabShard(alone, 8192, False, 256, 1.0))
        (logprob + entropy).sum().backward()

    assert peak_bytes(fused, torch.device("cpu")) < 4096 * 8192 * 4 / 4
