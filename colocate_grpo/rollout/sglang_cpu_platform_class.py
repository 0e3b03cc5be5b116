"""The platform class behind `sglang_cpu_platform.activate`; imports SGLang, so only an engine may import it."""

from __future__ import annotations

import torch
from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

UINT32 = 0xFFFFFFFF


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU without sgl_kernel: that library wants CUDA's, also for its CPU operations."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        # Seeded sampling. Attention works on one sequence at a time here, so it does not depend on the batch.
        add_deterministic_attention_backend_choices(["torch_native"])

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Seeded sampling needs a hash that SGLang has in Triton and sgl_kernel only, and no CUDA matmul kernels."""
        HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, HookType.REPLACE)
        HookRegistry.register(
            "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", _keep_torch_kernels, HookType.REPLACE
        )
        HookRegistry.apply_hooks()


def _keep_torch_kernels(enable_bmm: bool = True) -> None:
    """CPU matrix products have no batch-invariant kernels to switch to."""


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (64-bit seed, position, column): rows `seed`, `positions` [n] x columns [m] -> [n, m].

    Arithmetic modulo 2**32 in int64, because torch has no uint32 product on CPU.
    """
    seed_n = seed.to(torch.int64)
    blocks = [
        (seed_n & UINT32)[:, None],
        ((seed_n >> 32) & UINT32)[:, None],
        (positions.to(torch.int64) & UINT32)[:, None],
        (col_indices.to(torch.int64) & UINT32)[None, :],
    ]
    hash_nm = torch.zeros(1, 1, dtype=torch.int64)
    for block in blocks:
        hash_nm = _mix(hash_nm, block)
    hash_nm = hash_nm ^ 16  # length of the key in bytes
    hash_nm = _times(hash_nm ^ (hash_nm >> 16), 0x85EBCA6B)
    hash_nm = _times(hash_nm ^ (hash_nm >> 13), 0xC2B2AE35)
    return (hash_nm ^ (hash_nm >> 16)).to(torch.uint32)


def _mix(hash_: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotate(hash_ ^ block, 13), 5) + 0xE6546B64) & UINT32


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & UINT32


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Product modulo 2**32; split, so that int64 does not overflow."""
    high, low = factor >> 16, factor & 0xFFFF
    return (((value * high & UINT32) << 16) + value * low) & UINT32
