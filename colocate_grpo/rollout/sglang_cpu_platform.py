"""SGLang on a machine without a GPU, through SGLang's own extension point for other platforms.

The entry point is inert unless the engine asks for it (`COLOCATE_ENGINE_DEVICE=cpu`) and CUDA is absent. Every fused
layer then takes its pure PyTorch path.
"""

from __future__ import annotations

import os

DEVICE_VARIABLE = "COLOCATE_ENGINE_DEVICE"


def activate() -> str | None:
    """Dotted name of the platform class, or None where the platform does not apply."""
    if os.environ.get(DEVICE_VARIABLE) != "cpu":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return "colocate_grpo.rollout.sglang_cpu_platform_class:TorchCpuPlatform"
