"""A stand-in for NVML, and a small model directory and data files for the checks to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from colocate_grpo.config import Config
from colocate_grpo.doctor.finding import Context

GIB = 2**30


class Nvml:
    """pynvml's interface over cards that a test describes; without cards it fails as a machine without a driver.

    `memory` is GiB of every card, or of each; `lost` cards do not answer; `lists=False`: as under WSL2.
    """

    class NVMLError(Exception):
        pass

    def __init__(
        self,
        cards: int = 0,
        driver: str = "580.95.05",
        memory: float | Sequence[float] = 23.99,
        busy: dict[int, int] | None = None,
        lost: Sequence[int] = (),
        lists: bool = True,
    ):
        self.cards, self.driver, self.busy, self.lost, self.lists = cards, driver, busy or {}, lost, lists
        self.memory = list(memory) if isinstance(memory, Sequence) else [memory] * cards

    def nvmlInit(self) -> None:
        if not self.cards:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return self.cards

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA GeForce RTX 4090"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=int(self.memory[handle] * GIB), used=300 * 2**20)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if not self.lists:
            raise self.NVMLError("Not Supported")
        pid = self.busy.get(handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=5 * GIB)] if pid else []


def config(**sections: Any) -> Config:
    """A configuration for one card, `sections` on top."""
    values: dict[str, Any] = {
        "run": {"device": "cuda"},
        "model": {"path": "hf:Qwen/Qwen3-0.6B"},
        "data": {"train": "unused"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(values)


def context(nvml: Any = None, environment: dict[str, str] | None = None, **sections: Any) -> Context:
    return Context(config=config(**sections), nvml=nvml or Nvml(), environment=environment or {})


def write_model(directory: Path, shards: int = 2) -> Path:
    """A model directory with an index over `shards` files of random tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        save_file({f"layer.{i}": torch.ones(10, 10)}, directory / name)
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 10, "eos_token_id": 1}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return directory
