"""The processes of a run: tagged by an environment variable, found in /proc, ended by id.

SGLang puts its schedulers into sessions of their own, so no process group holds a whole run. Every process inherits
`COLOCATE_RUN_ID`; what carries it, and what descends from that, belongs to the run. `SPT_NOENV` keeps setproctitle
from writing titles over the environment that /proc shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

RUN_ID = "COLOCATE_RUN_ID"
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
END_TIMEOUT_S = 30.0


def run_id(run_dir: Path) -> str:
    """Tag of all processes of the run in `run_dir`, the same for every driver of it."""
    return hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]


def driver_id(run_dir: Path) -> str:
    """Tag of the processes of this driver: that of the run, and who supervises it."""
    return f"{run_id(run_dir)}:{os.getpid()}:{start_ticks(os.getpid())}"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot: nobody sets that clock. None where there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the name in parentheses, may hold anything; the start is the 22nd.
    return int(status.rpartition(")")[2].split()[19])


def tagged(tag: str) -> dict[str, str]:
    """What the environment of a process of a run must hold; any allow-list has to let both through."""
    return {RUN_ID: tag, "SPT_NOENV": "1"}


def become_subreaper() -> None:
    """Orphans of this process's descendants become its children instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def find(tag: str) -> list[psutil.Process]:
    """Living processes of this user that carry `tag` or its beginning, and their descendants; never this one."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if _carries(process, tag):
            found[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update((child.pid, child) for child in process.children(recursive=True))
    found.pop(os.getpid(), None)
    return [process for process in found.values() if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Runs, or is stopped; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(tag: str, grace_s: float, also: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """SIGTERM to everything with `tag` (and `also`), after `grace_s` SIGKILL, until nothing is left.

    Returns what was found. AssertionError where something survives SIGKILL (a process stuck in the kernel).
    """
    first = [*find(tag), *filter(is_alive, also)]
    if grace_s > 0:
        _signal(first, signal.SIGTERM)
        wait_ended(first, grace_s)
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := [*find(tag), *filter(is_alive, first)]:
        assert time.monotonic() < deadline, f"processes survive SIGKILL for {END_TIMEOUT_S} s: {left}"
        _signal(left, signal.SIGKILL)
        wait_ended(left, 1.0)
    return first


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float) -> bool:
    """Wait until none is alive; False when some still are after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    waiting = list(processes)
    while waiting := [process for process in waiting if is_alive(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def orphans(others: Iterable[int]) -> list[psutil.Process]:
    """Children of this process but `others`: as a subreaper it inherits what lost its tag and its parent."""
    others = set(others)
    return [child for child in psutil.Process().children() if child.pid not in others]


def reap(keep: Iterable[int] = ()) -> None:
    """Collect ended children that nobody else waits for (orphans a subreaper inherited)."""
    keep = set(keep)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in keep and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def catches(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would otherwise end it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)


def signal_those_that_catch(parent: psutil.Process, number: signal.Signals) -> list[int]:
    """Send `number` to the children of `parent` that have a handler for it; their ids."""
    with contextlib.suppress(psutil.NoSuchProcess):
        catching = [child for child in parent.children() if catches(child, number)]
        _signal(catching, number)
        return [child.pid for child in catching]
    return []


@contextlib.contextmanager
def lifeline(tag: str, log: Path) -> Iterator[None]:
    """A guard process that ends everything with `tag` once this process is gone, however it went."""
    reading, writing = os.pipe()
    with log.open("ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "colocate_grpo.processes", tag, str(reading)],
            pass_fds=[reading], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        guard.wait(timeout=END_TIMEOUT_S + 30)


def _carries(process: psutil.Process, tag: str) -> bool:
    try:
        value = process.environ().get(RUN_ID, "")
        return process.uids().real == os.getuid() and (value == tag or value.startswith(f"{tag}:"))
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):  # ended meanwhile, or someone else's
        return False
    except OSError:  # psutil lets ESRCH of a process that ends during the read through
        return False


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)  # psutil compares the start time first, so a reused id is safe


def _guard(tag: str, descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(descriptor, 1):
        pass
    if ended := end(tag, grace_s=0):
        print(f"the driver is gone: ended {len(ended)} processes of {tag}", flush=True)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
