"""NCCL communicators hold gigabytes of a card; between trainer phases they are suspended (torch >= 2.14)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from colocate_grpo.memory.ledger import Ledger


def suspend_communicators(groups: Iterable[dist.ProcessGroup], ledger: Ledger | None = None) -> None:
    """Free the device memory of the communicators; collective, and no operation may be outstanding."""
    for backend in _nccl_backends(groups):
        backend.suspend()
    if ledger:
        ledger.note("nccl", False)


def resume_communicators(groups: Iterable[dist.ProcessGroup], ledger: Ledger | None = None) -> None:
    """Undo `suspend_communicators`; collective."""
    if ledger:
        ledger.note("nccl", True)
    for backend in _nccl_backends(groups):
        backend.resume()


def _nccl_backends(groups: Iterable[dist.ProcessGroup]) -> list:
    nccl = [g for g in groups if dist.get_backend(g) == "nccl"]
    return [g._get_backend(torch.device("cuda")) for g in nccl]
