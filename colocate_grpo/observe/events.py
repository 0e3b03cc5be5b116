"""events.jsonl: what happened to a run, for the console, `status` and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colocate_grpo.disk_full import best_effort
from colocate_grpo.observe.jsonl import AttemptLog, Row

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


class EventLog(AttemptLog):
    """Writes events."""

    file_name = FILE_NAME

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event; on a full disk it is only told, because a run does not depend on it."""
        assert kind in KINDS, f"unknown event {kind!r}"
        with best_effort(f"event {kind}"):
            self.add(kind, fields)


def read_events(run_dir: Path) -> list[Row]:
    """All events in the order of writing; a damaged line is left out with a warning."""
    return EventLog.rows(run_dir)
