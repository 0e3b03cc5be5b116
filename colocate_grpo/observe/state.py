"""state.json: what the run is doing right now, for `status` and the driver's watchdog."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from colocate_grpo.checkpoint.files import read_object
from colocate_grpo.disk_full import best_effort

FILE_NAME = "state.json"
_MIN_INTERVAL_S = 0.5


class _Rollout(BaseModel):
    model_config = ConfigDict(strict=True)
    done: int
    total: int
    tokens_per_s: float = 0.0


class _State(BaseModel):
    model_config = ConfigDict(strict=True)
    attempt: int
    step: int
    steps: int
    phase: str
    progress: int
    time: float
    last: dict[str, Any]
    rollout: _Rollout | None = None


class StateFile:
    """Written atomically by global rank 0. `progress` rises with every sign of life and never falls."""

    def __init__(self, run_dir: Path, attempt: int, steps: int) -> None:
        self.path = Path(run_dir) / FILE_NAME
        previous = read_state(run_dir)
        self.values: dict[str, Any] = {
            "attempt": attempt,
            "step": 0,
            "steps": steps,
            "phase": "start",
            "last": previous.get("last", {}),
            "progress": previous.get("progress", 0),
        }
        self._written = 0.0
        self.update()

    def update(self, **values: Any) -> None:
        """Change values and write at once."""
        self.values.update(values)
        self.values["progress"] += 1
        self.values["time"] = time.time()
        partial = self.path.with_name(FILE_NAME + ".partial")
        with best_effort("state.json"):
            partial.write_text(json.dumps(self.values))
            partial.replace(self.path)
        self._written = time.monotonic()

    def update_often(self, **values: Any) -> None:
        """Like `update`, but at most twice a second: for progress inside a phase."""
        self.values.update(values)
        if time.monotonic() - self._written > _MIN_INTERVAL_S:
            self.update()


def read_state(run_dir: Path) -> dict[str, Any]:
    """The last state, or an empty dict where there is none, or what a power cut left of it (it is not fsynced)."""
    return read_object(Path(run_dir) / FILE_NAME, _State)
