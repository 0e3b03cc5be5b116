"""events.jsonl: what happened to a run, for the console, `status` and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from colocate_grpo.disk_full import best_effort
from colocate_grpo.observe.jsonl import AttemptLog, Row, Stamped

FILE_NAME = "events.jsonl"
KINDS = frozenset(
    [
        "attempt_start",
        "resume",
        "config_change",
        "engine_lost",
        "engine_restarted",
        "guard",
        "rollback",
        "save",
        "save_failed",
        "checkpoint_skipped",
        "rotate",
        "equal_rewards",
        "eval",
        "stop_requested",
        "update_skipped",
        "attempt_end",
        "run_end",
    ]
)


class _Gpu(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    gib: float


class _Hardware(BaseModel):
    model_config = ConfigDict(strict=True)
    gpus: list[_Gpu] = Field([])


class EventRow(Stamped):
    """What every event has, and what is reckoned with where an event has it."""

    step: int | None = None
    bytes: float = 0
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] | None = None
    command_line: str = ""
    versions: dict[str, Any] = Field({})
    hardware: _Hardware = Field(_Hardware())

    @model_validator(mode="after")
    def _is_whole(self) -> EventRow:
        needed = {"save": self.step, "config_change": self.changes}
        if needed.get(self.kind, ...) is None:
            raise ValueError(f"{self.kind} does not say what it is about")
        return self


class EventLog(AttemptLog):
    """Writes events."""

    file_name = FILE_NAME
    shape = EventRow

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event; on a full disk it is only told, because a run does not depend on it."""
        assert kind in KINDS, f"unknown event {kind!r}"
        with best_effort(f"event {kind}"):
            self.add(kind, fields)


def read_events(run_dir: Path) -> list[Row]:
    """All events in the order of writing; a damaged line is left out with a warning."""
    return EventLog.rows(run_dir)
