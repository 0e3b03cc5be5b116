"""The NVIDIA cards of this machine through NVML, which needs no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Card:
    """One card, or the `error` that it answers with; `processes` are (pid, bytes) of what computes on it.

    Under WSL2 and on virtual cards the driver does not list processes: None.
    """

    index: int
    name: str = ""
    memory: int = 0
    used: int = 0
    processes: list[tuple[int, int]] | None = None
    error: str = ""


@dataclass(frozen=True)
class Cards:
    """All cards and the driver's version ("": it does not say), or the reason why there are none."""

    driver: str = ""
    cards: list[Card] = field(default_factory=list)
    error: str = ""


def read_cards(nvml: Any) -> Cards:
    """Ask `nvml` (pynvml, or an object with its interface). One card that does not answer hides no other."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:  # no driver, or no library
        return Cards(error=str(error))
    return Cards(_driver(nvml), [_read_card(nvml, index) for index in range(count)])


def usable(cards: Sequence[Card], visible: str | None) -> list[Card]:
    """The cards that `visible` (CUDA_VISIBLE_DEVICES; None: unset) leaves to CUDA, in its order.

    As CUDA reads it, the first number that is no card ends the list. Names of cards are not looked up: all cards.
    """
    if visible is None or not by_number(visible):
        return list(cards)
    chosen: list[Card] = []
    for index in map(int, filter(None, visible.split(","))):
        if not 0 <= index < len(cards):
            break
        chosen.append(cards[index])
    return chosen


def by_number(visible: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES gives cards by number (none at all, too), the only way that SGLang reads."""
    return not visible or all(entry.strip().removeprefix("-").isdigit() for entry in visible.split(","))


def _driver(nvml: Any) -> str:
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:  # the cards are there all the same
        return ""


def _read_card(nvml: Any, index: int) -> Card:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:  # a card that fell off the bus
        return Card(index, error=str(error))
    return Card(index, name, memory.total, memory.used, _processes(nvml, handle))


def _processes(nvml: Any, handle: Any) -> list[tuple[int, int]] | None:
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not every driver lists them
        return None
    return [(p.pid, p.usedGpuMemory or 0) for p in running if p.pid != os.getpid()]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
