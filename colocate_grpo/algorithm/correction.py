"""Weights that correct for the difference between the engine's and the trainer's log-probs. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def correction_weight(name: str, train: Tensor, rollout: Tensor, cap: float, floor: float) -> Tensor:
    """A factor [m] for each token's policy loss; no gradient flows through it.

    `train` are the trainer's log-probs under the weights that sampled, `rollout` the engine's.
    tis: min(r, cap) (truncated importance sampling, Yao et al. 2025); mis: r, or 0 over the cap (masked);
    icepop: r inside [floor, cap], else 0 (IcePop, Ling team 2025). r = exp(train - rollout).
    """
    if name == "none":
        return torch.ones_like(train)
    ratio = (train.detach() - rollout).exp()
    if name == "tis":
        return ratio.clamp(max=cap)
    if name == "mis":
        return torch.where(ratio <= cap, ratio, 0.0)
    assert name == "icepop", name
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)
