"""The loss of one micro-batch and what is measured on the way."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from colocate_grpo.algorithm.correction import correction_weight
from colocate_grpo.algorithm.loss import kl, policy_loss
from colocate_grpo.config import AlgorithmConfig
from colocate_grpo.train.batch import MicroBatch


@dataclass
class Measures:
    """Sums over evaluated tokens, added up over micro-batches and DP ranks; the first eight come from the device."""

    loss: float = 0.0
    clipped: float = 0.0
    ppo_kl: float = 0.0
    entropy: float = 0.0
    rollout_difference: float = 0.0
    reference_kl: float = 0.0
    correction: float = 0.0
    correction_changed: float = 0.0
    tokens: float = 0.0
    packed_tokens: float = 0.0
    microbatches: float = 0.0

    @classmethod
    def of(cls, sums: Tensor, batch: MicroBatch) -> Measures:
        """From what `objective` measured [8]; waits for the device."""
        counted = [float(batch.targets.numel()), float(batch.tokens.numel()), 1.0]
        return cls(*(sums.tolist() + counted))

    def add(self, other: Measures) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_tensor(self) -> Tensor:
        return torch.tensor([getattr(self, field.name) for field in fields(self)], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, values: Tensor) -> Measures:
        return cls(*values.tolist())


def objective(config: AlgorithmConfig, batch: MicroBatch, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """The micro-batch's share of the global loss, and the device sums [8] of its Measures.

    logprob, entropy [m] with gradient. Without old log-probs the policy is its own old one (ratio 1).
    """
    old = logprob.detach() if batch.old_logprobs is None else batch.old_logprobs
    policy = policy_loss(config, logprob, old, batch.advantage, batch.sequence)
    correction = correction_weight(
        config.correction, old, batch.rollout_logprobs, config.correction_cap, config.correction_floor
    )
    token_loss = policy.loss * correction
    reference_kl = None
    if config.kl.coef > 0:
        assert batch.reference_logprobs is not None
        reference_kl = kl(config.kl.estimator, logprob, batch.reference_logprobs)
        token_loss = token_loss + config.kl.coef * reference_kl
    if config.entropy_coef > 0:
        token_loss = token_loss - config.entropy_coef * entropy
    loss = (token_loss * batch.weight).sum()
    sums = [
        loss.detach(),
        policy.clipped.sum(),
        (old - logprob.detach()).sum(),
        entropy.detach().sum(),
        (logprob.detach() - batch.rollout_logprobs).abs().sum(),
        loss.new_zeros(()) if reference_kl is None else reference_kl.detach().sum(),
        correction.sum(),
        (correction != 1.0).sum(),
    ]
    return loss, torch.stack([value.float() for value in sums])
