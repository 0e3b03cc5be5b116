"""Runs of the real command in the background, and what they measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from colocate_grpo import processes
from colocate_grpo.demo.recipe import DemoPaths
from colocate_grpo.observe.metrics import read_rows, view
from colocate_grpo.observe.state import read_state

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
TIMEOUT_S = 500.0
SMALL = [
    "run.steps=6", "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.slots=32", "checkpoint.every=2",
    "eval.every=4", "eval.sets.0.limit=32", "run.backoff=0.1s", "run.threads=1", "train.optimizer.warmup_steps=2",
]  # fmt: skip


@dataclass
class Runner:
    """Starts `colocate-grpo` in processes of its own."""

    demo: DemoPaths
    root: Path

    def overrides(self, name: str, *more: str) -> list[str]:
        return [
            f"run.dir={self.root / name}", f"model.path={self.demo.model}", f"data.train={self.demo.train}",
            f"eval.sets.0.path={self.demo.evaluation}", *SMALL, *more,
        ]  # fmt: skip

    def start(self, name: str, *more: str, command: str = "train", options: tuple[str, ...] = ()) -> subprocess.Popen:
        log = (self.root / f"{name}.log").open("ab")
        arguments = [command, *options, str(DEMO), *self.overrides(name, *more)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        return subprocess.Popen(
            [sys.executable, "-c", "from colocate_grpo.cli import main; main()", *arguments],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip

    def finish(self, name: str, *more: str, command: str = "train", options: tuple[str, ...] = ()) -> Path:
        """Run to the end; returns the run directory."""
        process = self.start(name, *more, command=command, options=options)
        code = process.wait(timeout=TIMEOUT_S)
        assert code == 0, self.log(name)
        return self.root / name

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()[-6000:]

    def wait_until(self, name: str, process: subprocess.Popen, is_it: Callable[[dict[str, Any]], bool]) -> None:
        """Block until state.json says so."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_it(read_state(self.root / name)):
            assert process.poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.002)


def kill_tree(process: subprocess.Popen, run_dir: Path) -> None:
    """SIGKILL to the driver and everything of its run, at once."""
    for victim in [psutil.Process(process.pid), *processes.find(processes.run_id(run_dir))]:
        with contextlib.suppress(psutil.NoSuchProcess):  # once the driver is gone, its guard does the same
            victim.send_signal(signal.SIGKILL)
    process.wait(timeout=TIMEOUT_S)
    processes.end(processes.run_id(run_dir), 0)


def measured(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The last row of each step without what is a time or says who measured it."""
    timed = ("perf/", "memory/")
    rows = view(read_rows(run_dir)).steps
    return {
        step: {k: v for k, v in row.items() if not k.startswith(timed) and k not in ("time", "attempt")}
        for step, row in rows.items()
    }
