"""`checkpoints list | pin | rollback | prune`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from colocate_grpo.checkpoint.rollbacks import tell_rollbacks
from colocate_grpo.checkpoint.store import Checkpoint, CheckpointStore
from colocate_grpo.disk_full import told_in_one_line
from colocate_grpo.errors import DataError
from colocate_grpo.run_directory import RunDirectory


def run_list(run_dir: Path, *, verify: bool, json_out: bool) -> int:
    """Print complete checkpoints and what is skipped; with `verify`, exit code 1 where contents have changed."""
    _, store = _open(run_dir)
    scan = store.scan()
    problems = {c.step: store.verify(c) for c in scan.complete} if verify else {}
    best, expendable = store.best(), {c.step for c in store.expendable()}
    rows = [_row(c, best, c.step in expendable, problems.get(c.step)) for c in scan.complete]
    if json_out:
        print(json.dumps({"complete": rows, "skipped": [str(s) for s in scan.skipped]}, indent=1))
    else:
        _print(rows, [str(skipped) for skipped in scan.skipped])
    return 1 if any(problems.values()) else 0


def run_pin(run_dir: Path, step: int, *, undo: bool) -> int:
    """Keep the checkpoint of a step for good, or let it go again."""
    _, store = _open(run_dir)
    checkpoint = store.pin(step, pinned=not undo)
    print(f"{checkpoint.path}: {'kept for good' if checkpoint.pinned else 'no longer pinned'}")
    return 0


def run_rollback(run_dir: Path, step: int) -> int:
    """Go back to the checkpoint of a step (-1: to the beginning). DataError while the run is running."""
    run, store = _open(run_dir)
    with told_in_one_line(run.path), _idle(run):
        came_from = _present_step(run, store)
        if step >= came_from:
            raise DataError(f"{run.path}: the run is at step {came_from}; going back to step {step} changes nothing")
        store.rollback(step, came_from=came_from, reason="by hand", by="user")
        tell_rollbacks(run.path, run.last_attempt())
    where = f"step {step}" if step >= 0 else "the beginning"
    print(f"{run.path}: back at {where}; the next start goes on from there, with other sampling seeds")
    return 0


def run_prune(run_dir: Path, *, dry_run: bool) -> int:
    """Remove what the rules no longer keep. DataError while the run is running, unless `dry_run`."""
    run, store = _open(run_dir)
    doomed = store.expendable()
    if not dry_run:
        with _idle(run):
            store.rotate()
    for checkpoint in doomed:
        print(f"{'would remove' if dry_run else 'removed'} {checkpoint.path} ({checkpoint.size / 2**30:.2f} GiB)")
    if not doomed:
        print(f"{run.path}: nothing to remove")
    return 0


def _open(run_dir: Path) -> tuple[RunDirectory, CheckpointStore]:
    run = RunDirectory(run_dir).require()
    config = run.config()
    return run, CheckpointStore(run.path, config.checkpoint, config.guards.step.window)


def _present_step(run: RunDirectory, store: CheckpointStore) -> int:
    """Where the run is: what it said last, unless it was rolled back since, or its newest checkpoint."""
    state, newest, history = run.state(), store.newest(), store.rollbacks()
    said = state["step"] if state and not (history and history[-1].time > state["time"]) else -1
    return max(said, newest.step if newest else -1)


def _idle(run: RunDirectory) -> Any:
    if run.is_running():
        raise DataError(f"{run.path}: is running; end it first with `colocate-grpo stop {run.path}`")
    return run.locked()


def _row(c: Checkpoint, best: Checkpoint | None, expendable: bool, problems: list[str] | None) -> dict[str, Any]:
    marks = [
        *(["pinned"] if c.pinned else []),
        *(["best"] if best and best.step == c.step else []),
        *(["awaits its evaluation"] if c.awaits_evaluation else []),
        *(["goes with the next save"] if expendable else []),
        *(["verified"] if problems == [] else problems or []),
    ]
    facts = {"step": c.step, "path": str(c.path), "bytes": c.size, "time": c.manifest["time"]}
    return {**facts, "evaluation": c.evaluation, "notes": marks}


def _print(rows: list[dict[str, Any]], skipped: list[str]) -> None:
    table = Table("step", "saved", "GiB", "evaluation", "notes", box=None)
    for row in rows:
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["time"]))
        scores = "  ".join(f"{k} {v:.3f}" for k, v in (row["evaluation"] or {}).items() if k.count("/") == 1)
        table.add_row(str(row["step"]), saved, f"{row['bytes'] / 2**30:.3f}", scores, ", ".join(row["notes"]))
    console = Console(highlight=False)
    console.print(table)
    for text in skipped:
        console.print(f"skipped: {text}", markup=False)
