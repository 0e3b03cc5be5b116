"""The NVIDIA cards of this machine through NVML, which needs no CUDA context."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Card:
    """One card; `processes` are (pid, bytes) of what computes on it."""

    index: int
    name: str
    memory: int
    used: int
    processes: list[tuple[int, int]]


@dataclass(frozen=True)
class Cards:
    """All cards and the driver's version, or the reason why there are none."""

    driver: str = ""
    cards: list[Card] = field(default_factory=list)
    error: str = ""


def read_cards(nvml: Any) -> Cards:
    """Ask `nvml` (pynvml, or an object with its interface)."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return Cards(driver, [_read_card(nvml, index) for index in range(count)])
    except nvml.NVMLError as error:  # no driver, no library, or a card that fell off the bus
        return Cards(error=str(error))


def _read_card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    processes = [(p.pid, p.usedGpuMemory or 0) for p in running if p.pid != os.getpid()]
    return Card(index, _text(nvml.nvmlDeviceGetName(handle)), memory.total, memory.used, processes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
