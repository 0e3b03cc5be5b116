"""A run under fault injection: the same command typed again and again, faults on its processes, and what must hold."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from colocate_grpo import processes
from colocate_grpo.observe.events import read_events
from colocate_grpo.observe.metrics import StepView, read_rows, view
from colocate_grpo.trajectory import read_trajectories

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_THE_SAME_TWICE = ("perf/", "memory/", "time", "attempt")
POLL_S = 0.02


class Run:
    """A run directory and the driver that presently works on it."""

    def __init__(self, path: Path, config: Path, overrides: Sequence[str], say: Callable[[str], None]):
        self.path, self.say = path, say
        self.command = [sys.executable, "-c", "from colocate_grpo.cli import main; main()", "train", str(config),
                        f"run.dir={path}", *overrides]  # fmt: skip
        self.driver: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def start(self) -> None:
        """Type the command (again)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        with (self.path.parent / f"{self.path.name}.out").open("ab") as output:
            self.driver = subprocess.Popen(self.command, cwd=REPOSITORY, stdout=output, stderr=output)

    def process(self) -> psutil.Process:
        assert self.driver is not None
        return psutil.Process(self.driver.pid)

    def wait_end(self, timeout_s: float) -> int:
        """Exit code of the driver."""
        assert self.driver is not None
        return self.driver.wait(timeout=timeout_s)

    def has_ended(self) -> bool:
        assert self.driver is not None
        return self.driver.poll() is not None

    def state(self) -> dict[str, Any]:
        path = self.path / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for(self, what: str, condition: Callable[[], Any], timeout_s: float = 900.0) -> Any:
        """The condition's value once it is true; an error ends with the driver's output."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline or self.has_ended():
                raise AssertionError(f"waited for {what} in vain (driver {self.driver}):\n{self.output()[-3000:]}")
            time.sleep(POLL_S)
        return value

    def ranks(self) -> list[psutil.Process]:
        """The ranks of the present attempt."""
        return [
            p
            for p in self.tagged()
            if "colocate_grpo.loop" in _cmdline(p) and "torch.distributed.run" not in _cmdline(p)
        ]

    def tagged(self) -> list[psutil.Process]:
        return processes.find(processes.run_id(self.path))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.path) if event["kind"] == kind]

    def view(self) -> StepView:
        return view(read_rows(self.path))

    def output(self) -> str:
        return (self.path.parent / f"{self.path.name}.out").read_text(errors="replace")

    def end(self) -> None:
        """End everything, whatever state it is in."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.send_signal(signal.SIGKILL)
            self.driver.wait()
        processes.end(processes.run_id(self.path), 0)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """A metrics row without what differs between two identical runs."""
    return {key: value for key, value in row.items() if not key.startswith(NOT_THE_SAME_TWICE)}


def assert_same_metrics(run: Run, reference: Run, steps: int) -> None:
    """The last row of each step, and each evaluation, bit for bit."""
    ours, theirs = run.view(), reference.view()
    assert sorted(ours.steps) == sorted(theirs.steps) == list(range(steps))
    for step in range(steps):
        mine, other = comparable(ours.steps[step]), comparable(theirs.steps[step])
        different = {
            key: (mine.get(key), other.get(key))
            for key in mine.keys() | other.keys()
            if mine.get(key) != other.get(key)
        }
        assert not different, f"step {step} differs from the uninterrupted run: {different}"
    points = [{(p.key, p.accuracy) for p in counted.evaluations} for counted in (ours, theirs)]
    assert points[0] == points[1], f"evaluations differ: {points[0] ^ points[1]}"


def assert_same_rollouts(run: Run, reference: Run, steps: int) -> None:
    """Every prompt of every step in the same order, with the same sampled tokens."""
    for step in range(steps):
        ours, theirs = (
            [
                (t.prompt_id, t.sample_index, tuple(t.token_ids))
                for t in read_trajectories(r.path / "rollouts" / f"step_{step}.jsonl.zst")
            ]
            for r in (run, reference)
        )
        assert ours == theirs, f"step {step} used other prompts or other answers than the uninterrupted run"


def assert_nothing_left(run: Run, timeout_s: float = 30.0) -> None:
    """No process carries the run's tag, and none has its directory on its command line."""
    deadline = time.monotonic() + timeout_s
    while left := _left(run):
        assert time.monotonic() < deadline, f"processes survive the run: {left}"
        time.sleep(POLL_S)


def _left(run: Run) -> list[psutil.Process]:
    named = [
        p for p in psutil.process_iter() if any(str(run.path) in part for part in _cmdline(p)) and processes.is_alive(p)
    ]
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    return [p for p in [*run.tagged(), *named] if p.pid not in own]


def flip_a_bit(path: Path, chance: random.Random) -> None:
    """Damage a file without changing its size."""
    contents = bytearray(path.read_bytes())
    contents[chance.randrange(len(contents))] ^= 1 << chance.randrange(8)
    path.write_bytes(contents)


def fill(directory: Path, keep_free: int) -> Path:
    """A file that leaves only `keep_free` bytes on the file system of `directory`."""
    ballast = directory / ".ballast"
    ballast.write_bytes(b"\0" * max(0, shutil.disk_usage(directory).free - keep_free))
    return ballast
