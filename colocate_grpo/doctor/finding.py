"""What a check finds, and what it may look at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from colocate_grpo.config import Config
from colocate_grpo.doctor.cards import Cards, read_cards
from colocate_grpo.nvidia import has_nvidia_card

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line. `environment` are variables that the run needs because of it."""

    level: Level
    what: str
    how_to_mend: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def ok(what: str) -> Finding:
    return Finding("ok", what)


def warn(what: str, how_to_mend: str, **environment: str) -> Finding:
    return Finding("warn", what, how_to_mend, environment)


def fail(what: str, how_to_mend: str) -> Finding:
    return Finding("fail", what, how_to_mend)


@dataclass
class Context:
    """The machine as the checks see it; a test puts its own parts in the place of the real ones."""

    config: Config | None = None
    nvml: Any = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    shared_memory: Path = Path("/dev/shm")

    @cached_property
    def cards(self) -> Cards:
        return read_cards(self.nvml)

    @property
    def wants_gpu(self) -> bool:
        """False for a CPU run: `device: cpu`, or `auto` where there is no NVIDIA device at all."""
        if self.config is None or self.config.run.device == "cuda":
            return True
        return self.config.run.device == "auto" and (bool(self.cards.cards) or has_nvidia_card())

    @property
    def cards_needed(self) -> int:
        return self.config.parallel.world_size if self.config else 1

    @property
    def required_config(self) -> Config:
        assert self.config is not None, "this check is for a configuration"
        return self.config

    @property
    def model_dir(self) -> Path | None:
        """The local model directory; None for a hub name or a bare config.json."""
        path = Path(self.required_config.model.path)
        return path if path.is_dir() else None
