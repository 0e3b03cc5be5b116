"""events.jsonl: what happened to a run, for the console, `status` and the report."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from colocate_grpo.observe.jsonl import Row, append_row, read_lines

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
        "attempt_end",
        "run_end",
    ]
)

log = logging.getLogger(__name__)


class EventLog:
    """Writes events; the driver and the ranks of an attempt may do so at the same time."""

    def __init__(self, run_dir: Path, attempt: int):
        self.path = Path(run_dir) / FILE_NAME
        self.attempt = attempt

    def emit(self, kind: str, **fields: Any) -> Row:
        """Append an event, with the time in Unix seconds, and return it."""
        assert kind in KINDS, f"unknown event {kind!r}"
        row = {"kind": kind, "time": time.time(), "attempt": self.attempt, **fields}
        append_row(self.path, row)
        return row


def read_events(run_dir: Path) -> list[Row]:
    """All events in the order of writing; a damaged line is left out with a warning."""
    lines = read_lines(Path(run_dir) / FILE_NAME)
    for damaged in lines.damaged:
        log.warning("%s", damaged)
    return lines.rows
