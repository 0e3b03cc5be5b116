"""NCCL communicators hold gigabytes of a card; between trainer phases they are suspended (torch >= 2.14)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from colocate_grpo.memory.ledger import Ledger


class Communicators:
    """Those of all groups of this process: Megatron makes more of them than it names."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._suspended: list[Any] = []  # torch's stubs leave out what a backend can suspend

    def suspend(self) -> None:
        """Free their device memory; collective, and no operation may be outstanding. Idempotent."""
        if not self._suspended:
            self._suspended = [backend for backend in nccl_backends() if backend._is_initialized()]
        if self._suspended:
            torch.cuda.synchronize()
        for backend in self._suspended:
            backend.suspend()
        self.ledger.note("nccl", False)

    def resume(self) -> None:
        """Undo `suspend`; collective. Idempotent."""
        self.ledger.note("nccl", True)
        for backend in self._suspended:
            backend.resume()
        self._suspended = []


def nccl_backends() -> Iterator[Any]:
    """In the order in which their groups were made, which is the same on every rank.

    A group's name for its backend is of no use here: it is `cpu:gloo,cuda:nccl` where each device has its own.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if "cuda:nccl" in dist.get_backend_config(group):
            yield group._get_backend(torch.device("cuda"))
