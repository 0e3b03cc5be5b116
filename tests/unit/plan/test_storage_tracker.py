"""The tracker against allocations that are known to the byte."""

from __future__ import annotations

import torch

from colocate_grpo.observe.storage_tracker import StorageTracker


def test_counts_what_is_alive_and_the_peak() -> None:
    before = torch.zeros(1000)
    with StorageTracker() as tracker:
        kept = before + 1
        dropped = torch.empty(2500)
        view = kept.view(10, 100)[2:]
        assert tracker.current_bytes == 4 * 3500
        del dropped
        assert tracker.current_bytes == 4 * 1000
        before.add_(1)
        tracker.reset_peak()
        kept.untyped_storage().resize_(0)
        kept.add_(0) if kept.untyped_storage().nbytes() else None
    assert tracker.peak_bytes == 4 * 1000
    assert view.shape == (8, 100)


def test_sees_what_autograd_keeps() -> None:
    """exp keeps its result for backward, which Python no longer names."""
    x = torch.zeros(100, 100, requires_grad=True)
    with StorageTracker() as tracker:
        y = x.exp().sum()
        assert tracker.current_bytes == 4 * 100 * 100 + 4
        y.backward()
        del y
        assert tracker.current_bytes == 4 * 100 * 100  # the gradient


def test_meta_tensors_count_like_real_ones() -> None:
    with StorageTracker() as tracker:
        a = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")
        b = a * 2
    assert tracker.current_bytes == 2 * a.nbytes
    assert b.is_meta
