"""Optimizer state in the model's own shapes, on DP rank 0's host, for a checkpoint that loads under another layout.

Megatron's own gather holds every shard, every message and every state at once, and its views are copied again for the
writers: 36 bytes a parameter on one rank. Here a state moves in pieces, and no view is left: 16 bytes. A load takes
one state after another: 4 bytes on every rank instead of 12, and the part of it that is joined again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

STATES = ("param", "exp_avg", "exp_avg_sq")
PIECE = 2**18


def gather_states(optimizer: DistributedOptimizer) -> dict[Any, Any] | None:
    """What `get_parameter_state_dp_zero` gives: flat fp32 states of every buffer on DP rank 0, None elsewhere.

    Collective over the DP group, through gloo.
    """
    group = optimizer.data_parallel_group_gloo
    assert group is not None
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        ((dtype, bucket_ranges),) = ranges.items()
        unpadded = optimizer.buffers[index].numel_unpadded
        states = {state: _gather_state(optimizer, index, bucket_ranges, state, group) for state in STATES}
        found[index] = {dtype: {**states, "numel_unpadded": unpadded}}
    return found if group.rank() == 0 else None


def room_for_states(optimizer: DistributedOptimizer) -> dict[Any, Any]:
    """The same to be loaded into, on every rank: takes memory only where something is written."""
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        unpadded = optimizer.buffers[index].numel_unpadded
        states = {state: torch.empty(unpadded) for state in STATES}
        found[index] = {dtype: {**states, "numel_unpadded": unpadded} for dtype in ranges}
    return found


def _gather_state(
    optimizer: DistributedOptimizer, index: int, bucket_ranges: Any, state: str, group: dist.ProcessGroup
) -> Tensor:
    """One state of one buffer, the padding between its buckets left out; empty but on DP rank 0."""
    buckets = optimizer.buffers[index].buckets
    whole = torch.empty(optimizer.buffers[index].numel_unpadded if group.rank() == 0 else 0)
    start = 0
    for bucket, ranges in zip(buckets, bucket_ranges, strict=True):
        part = whole[start : start + bucket.numel_unpadded]
        _gather_shards(_own_shard(optimizer, ranges, state, bucket.grad_data.numel() // group.size()), part, group)
        start += bucket.numel_unpadded
    return whole


def _own_shard(optimizer: DistributedOptimizer, ranges: Mapping[str, Any], state: str, size: int) -> Tensor:
    shard = torch.zeros(size)
    for param, places in ranges["param_map"].items():
        place = places["gbuf_local"]
        shard[place.start : place.end].copy_(optimizer._get_main_param_and_optimizer_states(param)[state])
    return shard


def _gather_shards(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Shards of all ranks one after another into `whole`, which may be shorter (padding) or empty (other ranks)."""
    first = group.rank() == 0
    for start in range(0, len(shard), PIECE):
        piece = shard[start : start + PIECE]
        received = [torch.empty_like(piece) for _ in range(group.size())] if first else None
        dist.gather(piece, received, group=group, group_dst=0)
        for rank, values in enumerate(received or []):
            place = whole[rank * len(shard) + start :][: len(values)]
            place.copy_(values[: len(place)])


def own_storage(param_state: Mapping[Any, Mapping[str, Any]] | None) -> None:
    """Give every tensor of gathered states memory of its own, state by state, so that the flat ones can go.

    Megatron's writer copies whatever is a view, all of it before it writes.
    """
    for state in STATES:
        for values in (param_state or {}).values():
            apply_factories(values)
            for sharded in _sharded(values[state]):
                sharded.data = sharded.data.clone()


def _sharded(entry: Any) -> Iterator[ShardedTensor]:
    if isinstance(entry, ShardedTensor):
        yield entry
    else:
        yield from nested_values(entry)
