"""Advantages of the samples of one batch, from their scores and groups. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STD_EPS = 1e-6


def advantages(name: str, scores: Sequence[float | None], groups: Sequence[int]) -> list[float]:
    """One advantage a sample; `groups[i]` is the group of sample i, groups may have any size.

    A score of None (infrastructure failure) is left out of its group and has advantage 0. So have a group
    of one and a group whose scores are all equal. An empty batch gives an empty list.
    """
    result = [0.0] * len(scores)
    members: dict[int, list[int]] = {}
    for index, (score, group) in enumerate(zip(scores, groups, strict=True)):
        if score is not None:
            members.setdefault(group, []).append(index)
    for indices in members.values():
        values = torch.tensor([scores[i] for i in indices], dtype=torch.float64)
        if (values == values[0]).all():
            continue
        for i, value in zip(indices, _GROUP_ADVANTAGES[name](values).tolist(), strict=True):
            result[i] = value
    return _over_batch_std(result, scores) if name == "reinforce_pp" else result


def grpo(scores: Tensor) -> Tensor:
    """(r - mean) / std of the group, std unbiased (DeepSeekMath, arXiv 2402.03300, section 4.1)."""
    return (scores - scores.mean()) / (scores.std() + STD_EPS)


def dr_grpo(scores: Tensor) -> Tensor:
    """r - mean: no division, which weighs easy and hard prompts equally (Dr. GRPO, arXiv 2503.20783)."""
    return scores - scores.mean()


def rloo(scores: Tensor) -> Tensor:
    """r - mean of the other members: leave-one-out baseline (Ahmadian et al., arXiv 2402.14740)."""
    return (scores - scores.mean()) * scores.numel() / (scores.numel() - 1)


def _over_batch_std(values: list[float], scores: Sequence[float | None]) -> list[float]:
    """REINFORCE++ with baseline: r - group mean, over the std of the whole batch (arXiv 2501.03262)."""
    counted = torch.tensor([v for v, s in zip(values, scores, strict=True) if s is not None], dtype=torch.float64)
    if counted.numel() < 2 or not counted.any():
        return values
    std = counted.std().item() + STD_EPS
    return [value / std for value in values]


_GROUP_ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": dr_grpo,
}
