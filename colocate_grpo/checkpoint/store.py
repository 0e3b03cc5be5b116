"""The directory of checkpoints: what is complete, which one counts, what is kept, how a save is published.

A checkpoint is written under a temporary name, made durable, sealed by its manifest, renamed, and only then are old
ones rotated out. The directory is the truth: there is no index to disagree with it. Marks that come later (pinned,
evaluated, damaged) are small files beside the manifest.

Sizes are checked whenever the directory is scanned, hashes when it matters: the driver verifies the newest
checkpoint before each attempt loads it, and marks it as damaged where a hash differs.
"""

from __future__ import annotations

import errno
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colocate_grpo.checkpoint.files import (
    REMOVED_PREFIX,
    files_below,
    remove,
    remove_tree,
    sha256_all,
    sync_directory,
    sync_tree,
    write_json,
)
from colocate_grpo.checkpoint.rollbacks import Rollback, add_rollback, rollbacks
from colocate_grpo.checkpoint.scan import (
    DAMAGED,
    EVALUATION,
    MANIFEST,
    MARKS,
    PINNED,
    Checkpoint,
    Scan,
    Skipped,
    own_paths,
    read,
    scan_directory,
    step_name,
    step_of,
)
from colocate_grpo.config import CheckpointConfig, Config, StepGuards
from colocate_grpo.errors import DataError

SAVING_PREFIX = ".saving_"
REPLACED_PREFIX = ".replaced_"
DEFAULT_GUARD_WINDOW: int = StepGuards.model_fields["window"].default


class SaveError(OSError):
    """A save that cannot be begun; every earlier checkpoint is as it was."""


class CheckpointStore:
    """Checkpoints of one run. One writer (the driver between attempts, global rank 0 in one); any number of readers."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, guard_window: int = DEFAULT_GUARD_WINDOW):
        self.run_dir = Path(run_dir)
        self.root = self.run_dir / "checkpoints"
        self.config = config
        self.guard_window = guard_window

    @classmethod
    def of(cls, config: Config) -> CheckpointStore:
        """The store of a configuration's run, which keeps a state older than the longest guard window."""
        return cls(config.run_dir, config.checkpoint, config.guards.step.window)

    # Reading

    def scan(self) -> Scan:
        """Look at every checkpoint; sizes are compared with the manifest, contents are not read."""
        return scan_directory(self.root, self.rollbacks())

    def complete(self) -> list[Checkpoint]:
        """Complete checkpoints in the order of steps."""
        return self.scan().complete

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint to go on from."""
        complete = self.complete()
        return complete[-1] if complete else None

    def newest_verified(self) -> tuple[Checkpoint | None, list[Skipped]]:
        """The newest checkpoint whose hashes match, and all that was skipped; damaged ones are marked for good."""
        while (newest := self.newest()) and (problems := self.verify(newest)):
            write_json(newest.path / DAMAGED, {"problems": problems, "time": time.time()})
        return newest, self.scan().skipped

    def verify(self, checkpoint: Checkpoint) -> list[str]:
        """Read all of a checkpoint and name the files whose contents are not those that were saved."""
        expected = {checkpoint.path / name: entry["sha256"] for name, entry in checkpoint.manifest["files"].items()}
        try:
            actual = sha256_all(expected)
        except OSError as error:  # a disk that cannot read a file back has lost it
            return [str(error)]
        return [
            f"{path.relative_to(checkpoint.path)}: its contents changed after the save (sha256 differs)"
            for path, digest in expected.items()
            if actual[path] != digest
        ]

    def get(self, step: int) -> Checkpoint:
        """The complete checkpoint of a step; DataError names what there is."""
        found = self.scan()
        for checkpoint in found.complete:
            if checkpoint.step == step:
                return checkpoint
        why = [str(s) for s in found.skipped if s.path == self._path(step)]
        steps = ", ".join(str(checkpoint.step) for checkpoint in found.complete) or "none"
        raise DataError(f"{self.root}: no complete checkpoint of step {step} {why or ''}(complete: {steps})")

    def best(self) -> Checkpoint | None:
        """The best by `checkpoint.best_metric`; the earliest of equals."""
        return next(iter(self._ranked(self.complete())), None)

    def rollbacks(self) -> list[Rollback]:
        """Every rollback of this run."""
        return rollbacks(self.run_dir)

    def rollback_target(self, fired_at: int) -> int:
        """Step to go back to when a guard fired at `fired_at`: older than its window, else the oldest, else -1."""
        steps = [checkpoint.step for checkpoint in self.complete() if checkpoint.step < fired_at]
        healthy = [step for step in steps if step <= fired_at - self.guard_window]
        return max(healthy) if healthy else min(steps, default=-1)

    # Writing

    def tidy(self) -> None:
        """Finish or remove what a kill cut off; only for the writer, while nothing else writes."""
        for path in own_paths(self.root, REPLACED_PREFIX):
            original = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
            if original.exists():
                remove_tree(path)
            else:
                path.rename(original)
        for prefix in (SAVING_PREFIX, REMOVED_PREFIX, f"{REMOVED_PREFIX}{REPLACED_PREFIX.lstrip('.')}"):
            for path in own_paths(self.root, prefix):
                remove(path)

    def begin(self, step: int, needed_bytes: int | None = None) -> Path:
        """A fresh temporary directory for all ranks to write into.

        `needed_bytes`: size of the checkpoint, default that of the newest one. SaveError where the disk has no room
        for it; checkpoints that no run can go back to are given up first.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        needed = self._expected_size() if needed_bytes is None else needed_bytes
        if self._lacks(needed):
            self._remove_dead()
        if missing := self._lacks(needed):
            raise SaveError(
                errno.ENOSPC,
                f"not enough room for the checkpoint of step {step}: {needed / 2**30:.2f} GiB and "
                f"checkpoint.min_free_gib={self.config.min_free_gib} are {missing / 2**30:.2f} GiB too much",
                str(self.root),
            )
        path = self.root / f"{SAVING_PREFIX}{self._path(step).name}"
        self.abandon(path)
        path.mkdir()
        return path

    def abandon(self, path: Path) -> None:
        """Remove the temporary directory of a save that failed."""
        remove(path)

    def publish(self, path: Path, manifest_fields: Mapping[str, Any]) -> Checkpoint:
        """Seal what `begin` gave and all ranks have written, give it its name, then rotate old ones out.

        `manifest_fields`: metrics, fingerprints and the like; `evaluation_due=True` keeps the checkpoint until
        `mark_evaluated`. OSError leaves every earlier checkpoint as it was.
        """
        step = step_of(path.name.removeprefix(SAVING_PREFIX))
        sync_tree(path)
        write_json(path / MANIFEST, self._manifest(path, step, manifest_fields))
        self._rename(path, self._path(step))
        self.rotate()
        self._remove_dead()
        return read(self._path(step))

    def mark_evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the evaluation of a saved step (metric name -> value), which decides what is best."""
        write_json(self.get(step).path / EVALUATION, dict(values))
        self.rotate()

    def pin(self, step: int, pinned: bool = True) -> Checkpoint:
        """Keep a checkpoint for good, or let it go again."""
        path = self.get(step).path
        if pinned:
            write_json(path / PINNED, {"time": time.time()})
        else:
            (path / PINNED).unlink(missing_ok=True)
        return self.get(step)

    def rollback(self, step: int, *, came_from: int, reason: str, by: str = "user") -> Rollback:
        """Go back to the checkpoint of `step` (-1: to the beginning): later ones no longer count.

        One atomic write decides it. The files of later checkpoints stay until the next save.
        """
        if step >= 0:
            self.get(step)
        return add_rollback(self.run_dir, step, came_from, reason, by)

    def expendable(self) -> list[Checkpoint]:
        """Complete checkpoints that the rules of `checkpoint.*` no longer keep."""
        complete = self.complete()
        kept = self._kept(complete)
        return [checkpoint for checkpoint in complete if checkpoint.step not in kept]

    def rotate(self) -> list[int]:
        """Remove what the rules no longer keep; returns the steps."""
        removed = self.expendable()
        for checkpoint in removed:
            remove_tree(checkpoint.path)
        return [checkpoint.step for checkpoint in removed]

    # Parts

    def _path(self, step: int) -> Path:
        return self.root / step_name(step)

    def _kept(self, complete: list[Checkpoint]) -> set[int]:
        steps = [checkpoint.step for checkpoint in complete]
        if not steps:
            return set()
        kept = set(steps[-self.config.keep_last :])
        kept.update(checkpoint.step for checkpoint in self._ranked(complete)[: self.config.keep_best])
        kept.update(c.step for c in complete if c.pinned or c.awaits_evaluation)
        if self.config.keep_every:
            kept.update(step for step in steps if (step + 1) % self.config.keep_every == 0)
        # A guard that fires now may have missed the beginning of the trouble: one state from before its window stays,
        # and the one after it, which takes its place once it is old enough.
        before = sum(step <= steps[-1] - self.guard_window for step in steps)
        kept.update(steps[max(0, before - 1) : before + 1])
        return kept

    def _ranked(self, complete: list[Checkpoint]) -> list[Checkpoint]:
        scored = [((c.evaluation or {}).get(self.config.best_metric or "", math.nan), c) for c in complete]
        pairs = [(score, c) for score, c in scored if -math.inf < score < math.inf]
        return [c for _, c in sorted(pairs, key=lambda pair: (-pair[0], pair[1].step))]

    def _manifest(self, path: Path, step: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        hashes = sha256_all(p for p in files_below(path) if p.name not in MARKS)
        files = {str(p.relative_to(path)): {"size": p.stat().st_size, "sha256": h} for p, h in hashes.items()}
        own: dict[str, Any] = {
            "format": 1,
            "step": step,
            "time": time.time(),
            "files": files,
            "rollbacks": len(self.rollbacks()),
        }
        assert fields.get("step", step) == step, f"a manifest of step {fields['step']} for the save of step {step}"
        return {**fields, **own}

    def _rename(self, source: Path, target: Path) -> None:
        replaced = target.with_name(f"{REPLACED_PREFIX}{target.name}")
        if target.exists():
            target.rename(replaced)
        source.rename(target)
        sync_directory(self.root)
        if replaced.exists():
            remove_tree(replaced)

    def _expected_size(self) -> int:
        newest = self.newest()
        return newest.size if newest else 0

    def _lacks(self, needed: int) -> int:
        missing = needed + int(self.config.min_free_gib * 2**30) - shutil.disk_usage(self.root).free
        return max(0, missing)

    def _remove_dead(self) -> None:
        """Give up what is rolled back or lost, unless nothing complete is left or someone pinned it."""
        found = self.scan()
        if not found.complete:
            return
        for skipped in found.skipped:
            if skipped.lost and not (skipped.path / PINNED).exists():
                remove_tree(skipped.path)
