"""A reward that works until `from_step`, then gives every answer nothing, until the run has gone back often enough."""

from __future__ import annotations

import json
from pathlib import Path

from colocate_grpo.checkpoint.store import rollbacks


def failing(task, *, run_dir: str, from_step: int, mended_after: int) -> float:
    step = json.loads((Path(run_dir) / "state.json").read_text())["step"]
    fails = step >= from_step and len(rollbacks(Path(run_dir))) < mended_after
    return 0.0 if fails else (len(task.response) % 10) / 9
