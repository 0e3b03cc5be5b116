"""Sampling of the embedded engine: what position i of a request draws depends on (seed, i) and its logits alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class SamplingRows(NamedTuple):
    """Sampling parameters of R rows; temperature 0 is greedy, top_k of the vocabulary's size is none."""

    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    min_p_R: Tensor
    filters: bool
    greedy: bool


def noise(seed: int, count: int) -> np.ndarray:
    """`count` uniform numbers in [0, 1) of the stream of `seed` (Philox, whose streams numpy keeps stable)."""
    raw = np.random.Philox(key=seed).random_raw(count)
    # 52 bits: the product with a total a little over 1 must not round up to the total itself.
    return (raw >> np.uint64(12)) * 2.0**-52


def sample(logits_RV: Tensor, noise_R: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Token ids [R] and their log-probs [R] at the sampling temperature, before any filter."""
    greedy_R = rows.temperature_R == 0
    scale_R = torch.where(greedy_R, 1.0, rows.temperature_R) if rows.greedy else rows.temperature_R
    probs = torch.softmax(logits_RV / scale_R.unsqueeze(1), -1)
    kept = _filter(probs, rows) if rows.filters else probs
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    target = noise_R.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits_RV.shape[1] - 1)
    if rows.greedy:
        tokens = torch.where(greedy_R.unsqueeze(1), logits_RV.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), probs.gather(1, tokens).log_().squeeze(1)


def _filter(probs_RV: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what top-k, top-p or min-p exclude; the likeliest token always stays."""
    ordered, order = probs_RV.sort(stable=True, dim=-1, descending=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    rank = torch.arange(probs_RV.shape[1])
    keep = rank < rows.top_k_R.unsqueeze(1)
    keep &= (before < rows.top_p_R.unsqueeze(1)) | (rows.top_p_R.unsqueeze(1) >= 1)
    keep &= ordered >= rows.min_p_R.unsqueeze(1) * ordered[:, :1]
    return torch.zeros_like(probs_RV).scatter_(1, order, ordered * (keep | (rank == 0)))
