"""What Megatron-core 0.16.1 needs to run without CUDA. On CUDA everything here does nothing."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from colocate_grpo.nvidia import has_nvidia_card

if TYPE_CHECKING:
    import torch


def guard_imports() -> None:
    """Keep Megatron from importing `flash_mla` where no driver can load it.

    Megatron catches ImportError only, but that package's loader raises OSError without a CUDA driver.
    """
    if not has_nvidia_card():
        sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]


def install(device: torch.device) -> None:
    """Patch the calls that Megatron hard-codes to CUDA. Idempotent; nothing on a CUDA device."""
    if device.type != "cpu":
        return
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def cuda_means_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A scope in which `device="cuda"`, `.cuda()` and `.type()` of Megatron's optimizer mean the CPU."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    import torch
    from torch.overrides import TorchFunctionMode

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
                args = (args[0], "cpu", *args[2:])
            return func(*args, **kwargs)

    return CudaMeansCpu()
