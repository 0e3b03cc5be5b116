"""The trainer: Megatron-core on CUDA + NCCL, or on CPU + gloo."""

from colocate_grpo.train import shim

shim.guard_imports()
