"""Started by the all-reduce check: sums that every rank can verify to the last bit, over several sizes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ELEMENTS = (1, 1_000, 1_048_576 + 3)


def main(backend: str, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        # A fork keeps the imports; a CUDA context cannot be forked, but none exists yet.
        multiprocessing.start_processes(_rank, args=(backend, ranks, rendezvous), nprocs=ranks, start_method="fork")


def _rank(rank: int, backend: str, ranks: int, rendezvous: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
    for elements in ELEMENTS:
        _compare(rank, ranks, elements, device)
    dist.destroy_process_group()


def _compare(rank: int, ranks: int, elements: int, device: torch.device) -> None:
    """Small integers: their sum is exact in fp32, whatever the order."""
    ramp = torch.arange(elements, device=device, dtype=torch.float32) % 1021
    mine = ramp + rank
    dist.all_reduce(mine)
    expected = ramp * ranks + ranks * (ranks - 1) / 2
    wrong = int((mine != expected).sum())
    if wrong:
        sys.exit(f"rank {rank}: {wrong} of {elements} sums are wrong")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
