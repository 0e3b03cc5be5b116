"""Which sequences share a micro-batch, and which DP rank runs it. Pure Python on lengths."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from colocate_grpo.train.shape import ModelShape

BALANCE_GOAL = 0.002


@dataclass(frozen=True)
class CostModel:
    """Time of a sequence in units of one token's matrix products: length + quadratic * length^2."""

    quadratic: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape) -> CostModel:
        """Attention under a causal mask does layers * heads * head_dim * length products a token."""
        return cls(shape.layers * shape.heads * shape.head_dim / shape.parameters)

    def __call__(self, length: int) -> float:
        return length + self.quadratic * length * length


def pack(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Indices grouped into bins of at most `cap` tokens, best fit first; a longer sequence gets its own bin."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in order:
        place = bisect.bisect_left(room, (lengths[i], -1))
        if place == len(room):
            bins.append([])
            left, target = cap, len(bins) - 1
        else:
            left, target = room.pop(place)
        bins[target].append(i)
        bisect.insort(room, (left - lengths[i], target))
    return bins


def plan(lengths: Sequence[int], cap: int, dp: int, cost: CostModel) -> list[list[list[int]]]:
    """Micro-batches of every DP rank: `plan[rank][k]` are indices into `lengths`; every index appears once.

    Ranks may get different numbers of micro-batches. Shares are balanced by cost: bins are dealt out, the
    dearest first, then bins are moved and swapped between the dearest and the cheapest rank. Deterministic.
    """
    bins = pack(lengths, cap)
    costs = [sum(cost(lengths[i]) for i in members) for members in bins]
    shares: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for b in sorted(range(len(bins)), key=lambda b: (-costs[b], b)):
        rank = min(range(dp), key=lambda r: (loads[r], r))
        shares[rank].append(b)
        loads[rank] += costs[b]
    while _improve(shares, loads, costs):
        pass
    return [[sorted(bins[b]) for b in sorted(share)] for share in shares]


def imbalance(loads: Sequence[float]) -> float:
    """How much longer the dearest rank works than the mean, as a share of the mean."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1.0 if mean else 0.0


def _improve(shares: list[list[int]], loads: list[float], costs: list[float]) -> bool:
    """Swap the pair of bins (or move one) that best evens out the two extreme ranks; False when done."""
    high = max(range(len(loads)), key=loads.__getitem__)
    low = min(range(len(loads)), key=loads.__getitem__)
    gap = loads[high] - loads[low]
    if imbalance(loads) <= BALANCE_GOAL:
        return False
    candidates = sorted((costs[b], b) for b in shares[low])
    best, choice = gap, None
    for b in shares[high]:
        for transfer, other in _transfers(costs[b], gap / 2, candidates):
            left = abs(gap - 2 * transfer)
            if left < best * (1 - 1e-9):
                best, choice = left, (b, other, transfer)
    if choice is None:
        return False
    given, taken, transfer = choice
    shares[high].remove(given)
    shares[low].append(given)
    if taken is not None:
        shares[low].remove(taken)
        shares[high].append(taken)
    loads[high] -= transfer
    loads[low] += transfer
    return True


def _transfers(cost: float, wanted: float, candidates: list[tuple[float, int]]) -> list[tuple[float, int | None]]:
    """(cost moved, bin taken back): a plain move, and swaps with the bins whose cost is nearest the ideal."""
    place = bisect.bisect_left(candidates, (cost - wanted, -1))
    found: list[tuple[float, int | None]] = [(cost, None)]
    for c, b in candidates[max(0, place - 1) : place + 1]:
        found.append((cost - c, b))
    return found
