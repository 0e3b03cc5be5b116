"""What the directory of checkpoints holds: which of its directories are whole and count, and why the others do not.

Only directories whose name the store writes itself (`step_000012`) are looked at: a copy that somebody keeps beside
them, an archive, notes are theirs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from colocate_grpo.checkpoint.files import read_json, read_object
from colocate_grpo.checkpoint.rollbacks import Rollback

MANIFEST = "manifest.json"
EVALUATION = "evaluation.json"
PINNED = "pinned.json"
DAMAGED = "damaged.json"
MARKS = (MANIFEST, EVALUATION, PINNED, DAMAGED)
NAME = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,})")
LAST_TIME = 1e11

Natural = Annotated[int, Field(ge=0)]


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    size: Natural
    sha256: str


class _Manifest(BaseModel):
    """What each manifest has; other fields are those of whoever saved."""

    model_config = ConfigDict(strict=True)
    format: int
    step: Natural
    time: Annotated[float, Field(ge=0, le=LAST_TIME)]
    files: dict[str, _File]
    rollbacks: Natural


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `manifest` has at least step, time, files, rollbacks; `evaluation` numbers alone."""

    path: Path
    step: int
    manifest: dict[str, Any]
    evaluation: dict[str, float] | None = None
    pinned: bool = False

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(entry["size"] for entry in self.manifest["files"].values())

    @property
    def awaits_evaluation(self) -> bool:
        """Saved before an evaluation that was due and has not been written yet."""
        return bool(self.manifest.get("evaluation_due")) and self.evaluation is None


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that must not be loaded; `lost` where it never can be, because its contents are known to be gone."""

    path: Path
    reason: str
    rolled_back: bool = False
    lost: bool = True

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True)
class Scan:
    """The directory at one moment: complete checkpoints in the order of steps, and the others with the reason."""

    complete: list[Checkpoint] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"step_{step:06d}"


def step_of(name: str) -> int:
    """The step of a name that `step_name` gives."""
    match = NAME.fullmatch(name)
    assert match, f"{name} is no checkpoint's name"
    return int(match[1])


def own_paths(root: Path, prefix: str = "") -> list[Path]:
    """What has `prefix` and the name of a checkpoint, sorted."""
    named = (path for path in root.glob(f"{prefix}step_*") if NAME.fullmatch(path.name.removeprefix(prefix)))
    return sorted(named)


def scan_directory(root: Path, history: Sequence[Rollback]) -> Scan:
    """Look at every checkpoint; sizes are compared with the manifest, contents are not read."""
    found = Scan()
    for path in own_paths(root):
        seen = _look_at(path, history)
        if not path.is_dir():  # a file of that name; or removed meanwhile, by whoever writes here
            continue
        if isinstance(seen, Checkpoint):
            found.complete.append(seen)
        else:
            found.skipped.append(seen)
    found.complete.sort(key=lambda checkpoint: checkpoint.step)
    return found


def read(path: Path) -> Checkpoint:
    """A checkpoint that is known to be whole."""
    return _checkpoint(path, read_object(path / MANIFEST, _Manifest))


def _look_at(path: Path, history: Sequence[Rollback]) -> Checkpoint | Skipped:
    try:
        if (path / DAMAGED).exists():
            return Skipped(path, f"damaged: {_problems(path)}")
        manifest = read_object(path / MANIFEST, _Manifest)
        if not manifest or manifest["step"] != step_of(path.name):
            return Skipped(path, "no readable manifest: the save did not finish")
        for name, entry in manifest["files"].items():
            if problem := _wrong_size(path / name, entry["size"]):
                return Skipped(path, problem)
        if reason := _why_rolled_back(manifest, history):
            return Skipped(path, reason, rolled_back=True)
        return _checkpoint(path, manifest)
    except OSError as error:  # a disk that does not answer, or no permission: it may be whole all the same
        return Skipped(path, f"cannot be read: {error}", lost=False)


def _checkpoint(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    values = read_json(path / EVALUATION)
    evaluation = {k: v for k, v in values.items() if _is_number(v)} if isinstance(values, dict) else None
    return Checkpoint(path, step_of(path.name), manifest, evaluation, (path / PINNED).exists())


def _problems(path: Path) -> str:
    problems = read_object(path / DAMAGED).get("problems")
    return "; ".join(map(str, problems[:3])) if isinstance(problems, list) else "found damaged"


def _wrong_size(path: Path, expected: int) -> str | None:
    try:
        actual = os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{path.name} is missing"
    return None if actual == expected else f"{path.name} has {actual} bytes instead of {expected}"


def _why_rolled_back(manifest: dict[str, Any], history: Sequence[Rollback]) -> str | None:
    for number, entry in enumerate(history[manifest["rollbacks"] :], start=manifest["rollbacks"] + 1):
        if manifest["step"] > entry.to:
            return f"rolled back (rollback {number} went back to step {entry.to})"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
