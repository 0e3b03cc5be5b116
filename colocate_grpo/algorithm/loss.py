"""Token losses of policy optimisation, KL estimators and aggregation. Pure functions on flat token tensors.

A micro-batch holds whole sequences: `sequence` [m] numbers the sequence of each token 0, 1, ... without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colocate_grpo.config import AlgorithmConfig

# exp() of more is no ratio of two policies; infinity times an advantage or a gradient of 0 would be NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` [m] to be minimised; `clipped` [m] is true where clipping changed the value."""

    loss: Tensor
    clipped: Tensor


def policy_loss(
    config: AlgorithmConfig, logprob: Tensor, old_logprob: Tensor, advantage: Tensor, sequence: Tensor
) -> PolicyLoss:
    """The token losses named by `config.ratio`; every argument is [m], `old_logprob` carries no gradient."""
    if config.ratio == "cispo":
        return cispo(logprob, old_logprob, advantage, config.clip_low, config.clip_high)
    log_ratio = logprob - old_logprob
    if config.ratio == "gspo":
        log_ratio = sequence_log_ratio(logprob, old_logprob, sequence)
    return clipped_surrogate(log_ratio, advantage, config.clip_low, config.clip_high, config.dual_clip)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; clip_high > clip_low: DAPO, 2503.14476).

    `dual_clip` c > 1 bounds the loss of a negative advantage by -c A (Ye et al., arXiv 1912.09729).
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    free, bounded = -ratio * advantage, -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        limit = -dual_clip * advantage
        over = (advantage < 0) & (loss > limit)
        loss, clipped = torch.where(over, limit, loss), clipped | over
    return PolicyLoss(loss, clipped)


def sequence_log_ratio(logprob: Tensor, old_logprob: Tensor, sequence: Tensor) -> Tensor:
    """Log of GSPO's length-normalised sequence ratio, on every token of the sequence (arXiv 2507.18071, eq. 7).

    The value is the sequence's, the gradient flows through the token itself (GSPO-token, eq. 14): with one
    advantage a sequence both have the same gradient.
    """
    difference = (logprob - old_logprob).detach()
    count = int(sequence[-1]) + 1 if sequence.numel() else 0
    total = difference.new_zeros(count).index_add_(0, sequence, difference)
    length = difference.new_zeros(count).index_add_(0, sequence, torch.ones_like(difference))
    return (total / length)[sequence] + logprob - logprob.detach()


def cispo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """-sg(clip(r)) A log p: clips the weight, keeps every token's gradient (MiniMax-M1, arXiv 2506.13585)."""
    ratio = (logprob.detach() - old_logprob).clamp(max=MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight * advantage * logprob, weight != ratio)


def kl(estimator: str, logprob: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) (Schulman, Approximating KL Divergence, 2020).

    k1: log p - log q, unbiased; its own gradient has mean 0. k2: half its square. k3: q/p - 1 - log q/p,
    unbiased and never negative.
    """
    log_ratio = reference - logprob
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    assert estimator == "k3", estimator
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


@dataclass(frozen=True)
class Denominators:
    """Sizes of the whole global batch, counted before it is split. Samples that are skipped count too."""

    tokens: int
    sequences: int
    max_tokens: int

    def token_weight(self, aggregation: str, sequence_tokens: int) -> float:
        """Weight of each token of a sequence of `sequence_tokens`; the weighted sum is the batch's loss.

        token_mean: over all tokens (DAPO, arXiv 2503.14476); sequence_mean: mean over sequences of their
        token means (GRPO, arXiv 2402.03300); constant: sum over a fixed length, mean over sequences
        (Dr. GRPO, arXiv 2503.20783).
        """
        if aggregation == "token_mean":
            return 1.0 / max(1, self.tokens)
        per_sequence = sequence_tokens if aggregation == "sequence_mean" else self.max_tokens
        return 1.0 / (max(1, self.sequences) * max(1, per_sequence))
