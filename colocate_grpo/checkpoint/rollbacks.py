"""The rollbacks of a run: decided by one write, and told by a metrics row and an event that follow from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from colocate_grpo.checkpoint.files import write_json
from colocate_grpo.errors import DataError
from colocate_grpo.observe.events import EventLog
from colocate_grpo.observe.metrics import MetricsLog, read_rows

ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier checkpoint; `to` is -1 where the run began anew."""

    came_from: int
    to: int
    reason: str
    by: str
    time: float


_HISTORY = TypeAdapter(list[Rollback])


def rollbacks(run_dir: Path) -> list[Rollback]:
    """Every rollback of a run; their number salts the sampling seeds. DataError where the file is damaged."""
    path = Path(run_dir) / ROLLBACKS
    try:
        return _HISTORY.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return []
    except ValidationError:  # taken for empty, it would make what was rolled back count again
        raise DataError(
            f"{path}: damaged, so that nobody can tell which checkpoints were rolled back; restore it from a copy, "
            'or write it anew from the events of kind "rollback" in events.jsonl (came_from, to, reason, by, time)'
        ) from None


def add_rollback(run_dir: Path, to: int, came_from: int, reason: str, by: str) -> Rollback:
    """One atomic write: from here on checkpoints after `to` no longer count."""
    entry = Rollback(came_from=came_from, to=to, reason=reason, by=by, time=time.time())
    write_json(Path(run_dir) / ROLLBACKS, [vars(old) for old in [*rollbacks(run_dir), entry]])
    return entry


def tell_rollbacks(run_dir: Path, attempt: int) -> None:
    """Write the metrics row and the event of each rollback that has none yet; only for who holds the run."""
    told = max((row.get("rollback", 0) for row in read_rows(run_dir) if row["kind"] == "rollback"), default=0)
    for number, entry in enumerate(rollbacks(run_dir)[told:], start=told + 1):
        fields = {"from": entry.came_from, "rollback": number, "reason": entry.reason}
        MetricsLog(run_dir, attempt).append("rollback", entry.to, fields)
        EventLog(run_dir, attempt).emit("rollback", step=entry.to, by=entry.by, **fields)
