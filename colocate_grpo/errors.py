"""Mistakes of the user, as opposed to broken invariants (which are asserts)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """One line that says what is wrong, where, and what to do; the command ends with exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration, or a command line override, that cannot be run."""


class DataError(UserError):
    """A data file, model directory or run directory that cannot be used."""


def writable_directory(path: Path) -> Path:
    """`path`, made if need be; DataError where a user named a place that cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: not a directory that can be written ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise DataError(f"{path}: not a directory that can be written (Permission denied)")
    return path


def nearest(name: str, allowed: Iterable[str]) -> str:
    """` (did you mean NAME?)` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
