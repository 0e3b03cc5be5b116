"""/dev/shm: NCCL without P2P and weight pushes on CPU go through it; a container gives 64 MB."""

from __future__ import annotations

import os

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.doctor.planned import planned

MIB = 2**20
LEAST = 1024 * MIB


def check(context: Context) -> Finding:
    if not context.shared_memory.is_dir():
        return fail(f"{context.shared_memory} does not exist", "mount -t tmpfs tmpfs /dev/shm")
    stats = os.statvfs(context.shared_memory)
    free, size = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    plan = planned(context) if context.config and context.wants_gpu else None
    needed = max(LEAST, 2 * plan.host.shm) if plan else LEAST
    what = f"{context.shared_memory}: {free // MIB} MiB free of {size // MIB}, {needed // MIB} wanted"
    if size < needed:
        return fail(what, f"in a container: docker run --shm-size={max(16, -(-needed // 2**30))}g (or --ipc=host)")
    if free < needed:
        return warn(what, "remove what earlier runs left there (files named nccl-*, torch_*, psm_*)")
    return ok(what)
