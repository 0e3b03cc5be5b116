"""Trainer to engines: one versioned transaction of bounded buckets.

Every rank gathers every bucket (a collective). On CPU rank 0 hands the tensors to its engines. On CUDA an IPC handle
can be opened only on the card that it lies on, so every rank offers its own copy, keyed by the card's UUID, and each
engine worker opens the one on its card.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from colocate_grpo.rollout.engine import EngineError, RolloutEngine

MIB = 2**20
Bucket = Sequence[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """The part of the trainer that a push needs."""

    def hf_buckets(self, max_bytes: int) -> Iterator[Bucket]: ...

    def checksums(self) -> dict[str, str]: ...


@runtime_checkable
class HandleEngine(Protocol):
    """An engine in other processes, which opens device memory by handles."""

    def cards(self) -> list[str]:
        """UUIDs of the cards that its workers use."""

    async def apply_handles(self, handles: dict[str, bytes], bucket: Bucket) -> None:
        """`handles`: by the UUID of the card; `bucket`: the same tensors on this rank's card."""


@dataclass(frozen=True)
class PushStats:
    """What a push cost: wall-clock seconds and bytes of model (not times the number of engines)."""

    seconds: float
    bytes: int

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / max(self.seconds, 1e-9)


async def push(trainer: WeightSource, engines: Sequence[RolloutEngine], version: int, bucket_mib: int) -> PushStats:
    """Give the trainer's weights to `engines` as `version`; collective, `engines` is empty on ranks other than 0.

    Raises EngineError where no engine took the weights.
    """
    start, total = time.monotonic(), 0
    for engine in engines:
        await engine.begin_update(version)
    for bucket in trainer.hf_buckets(bucket_mib * MIB):
        total += sum(tensor.nbytes for _, tensor in bucket)
        if bucket[0][1].is_cuda:
            await _apply_by_handle(bucket, engines)
        else:
            for engine in engines:
                await engine.apply_bucket(bucket)
    for engine in engines:
        await engine.end_update()
    return PushStats(time.monotonic() - start, total)


async def verify(trainer: WeightSource, engines: Sequence[RolloutEngine]) -> None:
    """Compare the checksums of trainer and engines (EngineError names what differs); collective like `push`."""
    expected = trainer.checksums()
    for engine in engines:
        found = await engine.checksums()
        differing = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
        if differing:
            raise EngineError(
                f"{len(differing)} of {len(expected)} weights differ between trainer and engine after push "
                f"{engine.weight_version}, first {differing[0]}"
            )


async def _apply_by_handle(bucket: Bucket, engines: Sequence[RolloutEngine]) -> None:
    """Not verified on a GPU. The bucket must outlive the loading: all ranks wait for rank 0 at the end."""
    from colocate_grpo.rollout.sglang_weights import flatten_bucket

    views = flatten_bucket(bucket)
    handles = _gather_handles(views, engines)
    for engine in engines:
        if isinstance(engine, HandleEngine):
            await engine.apply_handles(handles, views)
        else:
            await engine.apply_bucket(bucket)
    dist.barrier(group=_control_group())
    del views
    torch.cuda.ipc_collect()


def _gather_handles(views: Bucket, engines: Sequence[RolloutEngine]) -> dict[str, bytes]:
    """UUID of a card -> handle, on rank 0. A handle that nobody opens would keep its memory for good: only cards of
    living engines are asked."""
    from colocate_grpo.rollout.sglang_weights import serialize_views

    wanted = [{card for engine in engines if isinstance(engine, HandleEngine) for card in engine.cards()}]
    dist.broadcast_object_list(wanted, src=0, group=_control_group())
    card = str(torch.cuda.get_device_properties(views[0][1].device).uuid)
    offer = (card, serialize_views(views)) if card in wanted[0] else None
    torch.cuda.synchronize()
    offers: list[tuple[str, bytes] | None] = [None] * dist.get_world_size()
    dist.gather_object(offer, offers if dist.get_rank() == 0 else None, group=_control_group())
    return dict(o for o in offers if o is not None)


@functools.cache
def _control_group() -> dist.ProcessGroup:
    """gloo: no NCCL operation spins on the cards while an engine loads."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
