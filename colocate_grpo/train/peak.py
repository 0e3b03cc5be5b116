"""Peak memory of a piece of work, as the allocator saw it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` needed at its worst moment beyond what was allocated before it.

    CUDA: the allocator's own peak. CPU: every allocation and release, as the profiler records them.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
