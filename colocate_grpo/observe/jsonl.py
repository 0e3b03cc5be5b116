"""Append-only JSON Lines files that survive a crash in the middle of a line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class DamagedLine:
    """A line that is no JSON object, as a crash or a full disk leaves it."""

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
        raise OSError(f"{path}: only {written} of {len(line)} bytes were written; is the disk full?")


def read_lines(path: Path) -> Lines:
    """All rows of `path`; an absent file has none, and damaged lines are left out and named."""
    lines = Lines()
    if not path.exists():
        return lines
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            lines.damaged.append(DamagedLine(path, number, line[:80].decode(errors="replace")))
        else:
            lines.rows.append(row)
    return lines


def _is_cut_off(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # a cut-off line is no JSON, or no UTF-8
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python numbers; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)
