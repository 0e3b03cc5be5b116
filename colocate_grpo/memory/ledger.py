"""Who may be resident on a card in which phase, asserted at every change; and what memory is in use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import psutil
import torch

logger = logging.getLogger(__name__)

GIB = 2**30
Phase = Literal["engine_start", "trainer_start", "rollout", "eval", "idle", "train", "save", "push"]
MemoryClass = Literal[
    "weights", "gradients", "optimizer", "activations", "nccl", "engine_weights", "kv_cache", "cuda_graphs"
]

TRAINER: frozenset[MemoryClass] = frozenset({"weights", "gradients", "optimizer", "activations", "nccl"})
ENGINE: frozenset[MemoryClass] = frozenset({"engine_weights", "kv_cache", "cuda_graphs"})
ENGINE_CLASSES: dict[str, tuple[MemoryClass, ...]] = {
    "weights": ("engine_weights",),
    "kv_cache": ("kv_cache", "cuda_graphs"),
}
CLASSES = TRAINER | ENGINE
HANDOVER: frozenset[MemoryClass] = frozenset({"weights", "nccl", "engine_weights"})

# NCCL stays where its communicators cannot be suspended: it may be resident in every phase, and the plan counts it.
MAY_BE_RESIDENT: dict[Phase, frozenset[MemoryClass]] = {
    "engine_start": ENGINE,
    "trainer_start": TRAINER,
    "rollout": ENGINE | {"nccl"},
    "eval": ENGINE | {"nccl"},
    "idle": frozenset({"nccl"}),
    "train": TRAINER,
    "save": TRAINER,
    "push": HANDOVER,
}
MUST_BE_RESIDENT: dict[Phase, frozenset[MemoryClass]] = {
    "engine_start": frozenset(),
    "trainer_start": frozenset(),
    "rollout": frozenset({"engine_weights", "kv_cache"}),
    "eval": frozenset({"engine_weights", "kv_cache"}),
    "idle": frozenset(),
    "train": frozenset({"weights", "gradients", "optimizer"}),
    "save": frozenset({"weights", "optimizer"}),
    "push": frozenset({"weights", "engine_weights"}),
}


class LedgerError(AssertionError):
    """A class of memory is resident, or is missing, against the table."""


def _listed(names: frozenset[MemoryClass]) -> str:
    return ", ".join(sorted(names)) or "nothing"


class Ledger:
    """What is resident now. One object a rank; it only keeps the books, it moves nothing itself."""

    def __init__(self, device: torch.device, tolerance_bytes: int = 512 * 2**20):
        self.device = device
        self.tolerance_bytes = tolerance_bytes
        self.phase: Phase = "idle"
        self.resident: set[MemoryClass] = set()
        self.measured: dict[str, float] = {}

    def enter(self, phase: Phase) -> None:
        """Begin a phase. What an earlier phase left resident must be allowed in this one (LedgerError)."""
        assert phase in MAY_BE_RESIDENT, f"{phase} is none of the phases {sorted(MAY_BE_RESIDENT)}"
        left_over = frozenset(self.resident) - MAY_BE_RESIDENT[phase]
        if left_over:
            raise LedgerError(
                f"memory ledger: {_listed(left_over)} still resident when phase {phase} begins (after {self.phase}); "
                f"only {_listed(MAY_BE_RESIDENT[phase])} may be: put the owner to sleep first"
            )
        self.phase = phase
        self._measure()

    def note(self, class_: MemoryClass, resident: bool) -> None:
        """A class is about to become resident (call before it allocates), or has gone. Idempotent."""
        assert class_ in CLASSES, f"{class_} is none of the memory classes {sorted(CLASSES)}"
        if resident and class_ not in MAY_BE_RESIDENT[self.phase]:
            raise LedgerError(
                f"memory ledger: {class_} may not become resident in phase {self.phase}; "
                f"only {_listed(MAY_BE_RESIDENT[self.phase])} may be"
            )
        if resident:
            self.resident.add(class_)
        else:
            self.resident.discard(class_)
        logger.debug("memory ledger: %s %s (%s)", class_, "resident" if resident else "gone", self.phase)

    def note_engine(self, tags: Sequence[str], resident: bool) -> None:
        """The same for the classes behind an engine's sleep tags."""
        for class_ in [c for tag in tags for c in ENGINE_CLASSES[tag]]:
            self.note(class_, resident)

    def require(self) -> None:
        """Everything that the work of this phase touches is resident (LedgerError): call right before the work."""
        missing = MUST_BE_RESIDENT[self.phase] - self.resident
        if missing:
            raise LedgerError(f"memory ledger: phase {self.phase} needs {_listed(missing)}: wake the owner first")

    def metrics(self) -> dict[str, float]:
        """`memory/PHASE/{allocated,reserved,free,host_rss}_gib` of each phase entered since the last call."""
        measured, self.measured = self.measured, {}
        return measured

    def compare_asleep(self, planned_bytes: int) -> None:
        """With everything asleep: a warning where more of the card is in use than planned plus the tolerance.

        Counts the whole device, so that it sees what an allocator's statistics hide. Not an error: the plan assumes
        some of what CUDA and NCCL keep, and what is too much ends in an out-of-memory error of its own.
        """
        if self.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.device)
        self.measured[f"memory/{self.phase}/beyond_plan_gib"] = (total - free - planned_bytes) / GIB
        if total - free > planned_bytes + self.tolerance_bytes:
            logger.warning(
                "memory ledger: %.2f GiB of %s in use in phase %s with everything asleep, planned %.2f GiB "
                "(+ memory.tolerance_mib)", (total - free) / GIB, self.device, self.phase, planned_bytes / GIB,
            )  # fmt: skip

    def _measure(self) -> None:
        figures = memory_figures(self.device)
        logger.info("memory %s: %s", self.phase, " ".join(f"{k}={v / GIB:.2f}GiB" for k, v in figures.items()))
        self.measured |= {f"memory/{self.phase}/{k}_gib": v / GIB for k, v in figures.items()}


def memory_figures(device: torch.device) -> dict[str, int]:
    """Bytes: allocated and reserved by torch on `device`, free on it (CPU: in the machine), resident host memory."""
    host_rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return {"allocated": host_rss, "reserved": host_rss, "free": psutil.virtual_memory().available,
                "host_rss": host_rss}  # fmt: skip
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "free": torch.cuda.mem_get_info(device)[0],
        "host_rss": host_rss,
    }
