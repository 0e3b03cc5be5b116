"""Where the processes of a run are: each writes the stacks of all its threads to a file of its own when asked."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import psutil

from colocate_grpo import processes

POLL_S = 0.1
SETTLED_S = 0.5
TIMEOUT_S = 10.0


def write_when_asked(directory: Path) -> None:
    """From now on SIGUSR1 makes this process write its stacks into `directory`.

    One file a process: the handler writes piece by piece, and pieces of two processes would mix in a common log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, file=_file(directory, os.getpid()).open("w"), all_threads=True)


def collect(parent: psutil.Process, directory: Path) -> str:
    """Stacks of the children of `parent` that know how to write them; ends by itself when one cannot any more."""
    asked = processes.signal_those_that_catch(parent, signal.SIGUSR1)
    files = {pid: _file(directory, pid) for pid in asked}
    deadline = time.monotonic() + TIMEOUT_S
    while not all(map(_is_settled, files.values())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return "\n".join(f"process {pid}:\n{_read(file) or 'wrote nothing'}" for pid, file in files.items())


def remove_files(directory: Path) -> None:
    """Of processes that have ended."""
    for file in directory.glob("stacks_*.txt"):
        file.unlink()


def _file(directory: Path, pid: int) -> Path:
    return directory / f"stacks_{pid}.txt"


def _is_settled(file: Path) -> bool:
    return bool(_read(file)) and time.time() - file.stat().st_mtime > SETTLED_S


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
