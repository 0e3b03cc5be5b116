"""Append-only JSON Lines files that survive a crash in the middle of a line."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from colocate_grpo.checkpoint.files import has_shape

Row = dict[str, Any]
LAST_TIME = 1e11  # a date can be made of it
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DamagedLine:
    """A line that is no row, as a crash, a full disk or a flipped bit leaves it."""

    path: Path
    number: int
    beginning: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: damaged line left out: {self.beginning!r}"


@dataclass(frozen=True)
class Lines:
    """The rows of a file in order, and the lines that could not be read."""

    rows: list[Row] = field(default_factory=list)
    damaged: list[DamagedLine] = field(default_factory=list)


class Stamped(BaseModel):
    """What every row of an `AttemptLog` has."""

    model_config = ConfigDict(strict=True)
    kind: str
    attempt: int
    time: Annotated[float, Field(ge=0, le=LAST_TIME)]


class AttemptLog:
    """Appends to a file of a run directory; the driver and the ranks of an attempt may do so at the same time."""

    file_name: ClassVar[str]
    shape: ClassVar[type[BaseModel]] = Stamped

    def __init__(self, run_dir: Path, attempt: int):
        self.path = Path(run_dir) / self.file_name
        self.attempt = attempt

    @classmethod
    def read(cls, run_dir: Path) -> Lines:
        """All rows in the order of writing, and the lines that are none."""
        return read_lines(Path(run_dir) / cls.file_name, cls.shape)

    @classmethod
    def rows(cls, run_dir: Path) -> list[Row]:
        """All rows in the order of writing; a damaged line is left out with a warning."""
        lines = cls.read(run_dir)
        for damaged in lines.damaged:
            log.warning("%s", damaged)
        return lines.rows

    def add(self, kind: str, fields: Mapping[str, Any]) -> Row:
        """Append a row with the attempt and the time in Unix seconds, and return it."""
        row = {"kind": kind, "attempt": self.attempt, "time": time.time(), **fields}
        append_row(self.path, row)
        return row


def append_row(path: Path, row: Row) -> None:
    """Append one line with a single write; several processes may append to the same file.

    A last line that was cut off is ended first, so that it damages nothing but itself. Not fsynced: the page
    cache outlives the process, and a power failure costs the last rows only. Raises OSError on a full disk.
    """
    line = json.dumps(row, default=_plain).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if _is_cut_off(descriptor):
            line = b"\n" + line
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written < len(line):
        said = f"only {written} of {len(line)} bytes were written; is the disk full?"
        raise OSError(errno.ENOSPC, said, str(path))


def read_lines(path: Path, shape: type[BaseModel] | None = None) -> Lines:
    """All rows of `path`; an absent file has none, and damaged lines (also those without `shape`) are named."""
    lines = Lines()
    if not path.exists():
        return lines
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = _parse(line, shape)
        if row is None:
            lines.damaged.append(DamagedLine(path, number, line[:80].decode(errors="replace")))
        else:
            lines.rows.append(row)
    return lines


def _is_cut_off(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _parse(line: bytes, shape: type[BaseModel] | None) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # a cut-off line is no JSON, or no UTF-8
        return None
    return row if isinstance(row, dict) and (shape is None or has_shape(row, shape)) else None


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python numbers; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)
