"""A run directory, a driver in a process of its own, and the faults its ranks are to have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from small_loop import ENGINE

from colocate_grpo import processes
from colocate_grpo.observe.events import read_events

HERE = Path(__file__).parent
TIMEOUT_S = 300.0
DRIVER = """
import logging, sys
from colocate_grpo.config_file import load_config
from colocate_grpo.driver import supervise
logging.basicConfig(level="INFO", format="%(message)s")
sys.exit(supervise(load_config(sys.argv[1]), command_line=sys.argv, entry="small_loop"))
"""


class Run:
    """One run of `small_loop` under the real driver and the real torchrun."""

    def __init__(self, directory: Path):
        self.dir = directory / "run"
        self.config_path = directory / "config.yaml"
        self.drivers: list[subprocess.Popen[bytes]] = []

    def configure(self, faults: dict[int, dict[str, Any]] | None = None, **sections: Any) -> None:
        # Where a test is not about them, limits are for hangs: a busy machine must not reach them.
        run = {"dir": str(self.dir), "steps": 6, "backoff": 0.1, "hang_timeout": 600, "start_timeout": 600}
        values: dict[str, Any] = {
            "run": {**run, **sections.pop("run", {})},
            "model": {"path": "none"},
            "data": {"train": "none"},
            "checkpoint": {"every": 2, "min_free_gib": 0.0},
            **sections,
        }
        self.config_path.write_text(yaml.safe_dump(values))
        if faults:
            self.dir.mkdir(exist_ok=True)
            (self.dir / "config.yaml").write_text(yaml.safe_dump(values))
            (self.dir / "faults.json").write_text(json.dumps(faults))

    def set_in_the_run(self, **options: Any) -> None:
        """Other values of section `run` in the run's own configuration file."""
        path = self.dir / "config.yaml"
        values = yaml.safe_load(path.read_text())
        values["run"].update(options)
        path.write_text(yaml.safe_dump(values))

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        with (self.config_path.parent / "driver.out").open("ab") as output:
            driver = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(self.config_path)], env=environment, stdout=output, stderr=output
            )
        self.drivers.append(driver)
        return driver

    def finish(self, driver: subprocess.Popen[bytes] | None = None, timeout_s: float = TIMEOUT_S) -> int:
        """Exit code of the driver; nothing of the run may be left, the engines in their own sessions included."""
        driver = driver or self.start()
        code = driver.wait(timeout=timeout_s)
        self.assert_nothing_left()
        return code

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        self.wait_for(lambda: not self.living(), within_s, "the end of all processes")

    def living(self) -> list[psutil.Process]:
        found = processes.find(processes.run_id(self.dir))
        return found + [p for pid in self.read("engine_pids").split() if (p := engine(int(pid)))]

    def ranks(self) -> list[psutil.Process]:
        found = processes.find(processes.run_id(self.dir))
        return [p for p in found if "RANK" in p.environ() and "small_loop" in p.cmdline()]

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S, what: str = "") -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s; driver says:\n{self.output()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        def reached() -> bool:
            state = json.loads(self.read("state.json") or "{}")
            return state.get("attempt") == attempt and state.get("step", -1) >= step

        self.wait_for(reached, what=f"step {step} of attempt {attempt}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.dir) if event["kind"] == kind]

    def outcomes(self) -> list[str]:
        return [event["outcome"] for event in self.events("attempt_end")]

    def read(self, name: str) -> str:
        path = self.dir / name
        return path.read_text() if path.exists() else ""

    def output(self) -> str:
        return (self.config_path.parent / "driver.out").read_text()


def engine(pid: int) -> psutil.Process | None:
    """The living engine with this id; None where it has ended, also while it is looked at, or the id is another's."""
    try:
        process = psutil.Process(pid)
        return process if processes.is_alive(process) and ENGINE in process.cmdline() else None
    except psutil.NoSuchProcess:
        return None
