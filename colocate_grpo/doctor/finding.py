"""What a check finds, and what it may look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, Literal

from colocate_grpo.config import Config
from colocate_grpo.doctor.cards import Card, Cards, read_cards, usable
from colocate_grpo.errors import UserError
from colocate_grpo.hub import downloaded_model
from colocate_grpo.nvidia import has_nvidia_card
from colocate_grpo.plan.assessment import Plan, plan_shape
from colocate_grpo.plan.hardware import Assumptions
from colocate_grpo.plan.model_shape import read_model_config
from colocate_grpo.train.shape import validate_model

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
    _answers: dict[str, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=RLock)

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
    def wants_servers(self) -> bool:
        """False where no SGLang server will work on a card."""
        return self.wants_gpu and (self.config is None or self.config.rollout.engine == "sglang")

    @property
    def cards_needed(self) -> int:
        return self.config.parallel.world_size if self.config else 1

    @cached_property
    def visible(self) -> list[Card]:
        """The cards that CUDA_VISIBLE_DEVICES leaves."""
        return usable(self.cards.cards, self.environment.get("CUDA_VISIBLE_DEVICES"))

    @property
    def used(self) -> list[Card]:
        """The cards that the run works on, without a configuration all visible ones; none on the CPU."""
        if not self.wants_gpu:
            return []
        return [card for card in self.visible[: self.cards_needed if self.config else None] if not card.error]

    @property
    def required_config(self) -> Config:
        assert self.config is not None, "this check is for a configuration"
        return self.config

    @property
    def model_dir(self) -> Path | None:
        """The local model directory; None for a hub name not yet downloaded, or a bare config.json."""
        model = self.required_config.model
        return Path(model.path) if Path(model.path).is_dir() else downloaded_model(model)

    @property
    def model_config(self) -> dict[str, Any] | UserError:
        """The model's config.json, or why there is none."""
        model = self.required_config.model
        return self._once("model_config", lambda: read_model_config(model.path, model.revision))

    @property
    def plan(self) -> Plan | UserError:
        """The plan for the cards that the run works on, or why there is none: `memory_plan` alone says it."""
        return self._once("plan", self._make_plan)

    def _make_plan(self) -> Plan:
        found, config = self.model_config, self.required_config
        if isinstance(found, UserError):
            raise found
        card = min((card.memory for card in self.used), default=None)
        return plan_shape(validate_model(config, found), config, Assumptions(), card)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """Checks run at once, and a hub that does not answer is waited for one time."""
        with self._lock:
            if name not in self._answers:
                try:
                    self._answers[name] = make()
                except UserError as error:  # an answer like another
                    self._answers[name] = error
            return self._answers[name]
