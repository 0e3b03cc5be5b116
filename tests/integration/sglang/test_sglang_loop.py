"""The demo on real servers, the same command typed five times: every kind of end, and what the run has then become."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from colocate_grpo import processes
from colocate_grpo.demo.recipe import DemoPaths
from colocate_grpo.observe.events import read_events
from colocate_grpo.observe.metrics import read_rows, view
from colocate_grpo.observe.state import read_state

CONFIG = Path(__file__).parents[3] / "configs" / "demo_sglang.yaml"
MAIN = [sys.executable, "-c", "from colocate_grpo.cli import main; main()"]
TIMEOUT_S = 900.0
ONE_WORKER, TWO_ENGINES = ["rollout.tp=1"], ["rollout.tp=1", "rollout.engines=2", "run.max_attempts=1"]
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


class Run:
    """One run directory; every `start` is an attempt at it by a driver of its own."""

    def __init__(self, root: Path, demo: DemoPaths):
        self.path, self.log = root / "run", root / "train.log"
        self.overrides = [
            f"run.dir={self.path}", f"model.path={demo.model}", f"data.train={demo.train}",
            f"eval.sets.0.path={demo.evaluation}",
            "run.steps=3", "rollout.prompts_per_step=16", "rollout.verify_weights_every=1",
            "checkpoint.every=1", "eval.every=0", "eval.at_start=false", "train.optimizer.warmup_steps=1",
        ]  # fmt: skip
        self.attempt = 0
        self.driver: subprocess.Popen[bytes] | None = None
        self.ports: set[int] = set()

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        """Type the command, in a process group of its own as a terminal does it."""
        command = [*MAIN, "train", str(CONFIG), *self.overrides, *overrides]
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.attempt += 1
        return self.driver

    def wait_for_rollout(self, step: int) -> None:
        """Until this attempt generates for `step`. The ports that the run holds are noted before, when it pushes
        first: finding them takes a while, and what is to meet a rollout must not come after it.
        """
        self._wait_until(lambda state: state["phase"] != "start")
        own = {p.pid for p in processes.find(processes.run_id(self.path))}
        self.ports = {port for port, pid in listening() if pid in own}
        self._wait_until(lambda state: (state["step"], state["phase"]) == (step, "rollout"))

    def _wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Until the condition holds of the state that this attempt has written."""
        deadline = time.monotonic() + TIMEOUT_S
        while not ((state := read_state(self.path)).get("attempt") == self.attempt and condition(state)):
            assert self.driver is not None
            assert self.driver.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.002)

    def servers(self) -> list[psutil.Process]:
        return [p for p in processes.find(processes.run_id(self.path)) if "sglang.launch_server" in p.cmdline()]

    def exit_code(self) -> int:
        """Of the driver, once it has ended."""
        assert self.driver is not None
        return self.driver.wait(timeout=TIMEOUT_S)

    def assert_nothing_left(self) -> None:
        assert len(self.ports) > 0
        assert processes.find(processes.run_id(self.path)) == []
        assert not self.ports & {port for port, _ in listening()}

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_events(self.path) if event["kind"] == kind]

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def listening() -> set[tuple[int, int | None]]:
    """(port, process id) of everything on this machine that listens."""
    connections = psutil.net_connections(kind="inet")
    return {(c.laddr.port, c.pid) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_model) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("sglang_loop"), demo_model)
    yield run
    if run.driver is not None:
        run.driver.kill()
        run.driver.wait()
    processes.end(processes.run_id(run.path), grace_s=0.0)


def press_ctrl_c(driver: subprocess.Popen[bytes]) -> None:
    os.killpg(driver.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("step", "ask", "reason"),
    [(1, press_ctrl_c, "SIGINT"), (1, subprocess.Popen.terminate, "SIGTERM")],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_in_the_rollout_ends_the_run_with_its_servers(
    run: Run, step: int, ask: Callable[[subprocess.Popen[bytes]], None], reason: str
):
    driver = run.start(*ONE_WORKER)
    run.wait_for_rollout(step)
    ask(driver)
    assert run.exit_code() == 0, run.output()
    run.assert_nothing_left()
    assert run.events("run_end")[-1]["outcome"] == "stopped"
    assert [event["reason"] for event in run.events("stop_requested")][-1] == reason


def test_kill_9_of_the_driver_and_stop_leave_nothing(run: Run):
    driver = run.start(*ONE_WORKER)
    run.wait_for_rollout(1)
    driver.kill()
    driver.wait()
    stop = subprocess.run([*MAIN, "stop", str(run.path)], capture_output=True, text=True, timeout=120)
    assert stop.returncode == 0, stop.stderr
    assert "not running; it goes on from step 1" in stop.stdout
    run.assert_nothing_left()


def test_without_any_engine_the_command_fails_with_a_clear_message(run: Run):
    run.start(*TWO_ENGINES)
    run.wait_for_rollout(1)
    servers = run.servers()
    assert len(servers) == 2
    for server in servers:
        server.kill()
    assert run.exit_code() == 1, run.output()
    run.assert_nothing_left()
    end = json.loads((run.path / "attempts" / f"{run.attempt}.exit.json").read_text())
    assert (end["kind"], end["step"]) == ("engine", 1)
    assert "all 2 engines are lost; the last one: engine " in end["message"]
    assert {event["engine"] for event in run.events("engine_lost")} == {0, 1}


def test_the_same_command_goes_on_to_the_end(run: Run):
    run.start()
    run.wait_for_rollout(1)
    assert run.exit_code() == 0, run.output()
    run.assert_nothing_left()
    assert run.events("run_end")[-1]["outcome"] == "finished"
    assert [event["step"] for event in run.events("resume")] == [0, 0, 0, 0]


def test_every_step_is_there_with_versions_that_advance_by_one(run: Run):
    steps = view(read_rows(run.path)).steps
    assert sorted(steps) == [0, 1, 2]
    assert [steps[i]["weight_version"] for i in range(3)] == [0, 1, 2]
    assert all(row["rollout/failed_ratio"] == 0 and row["train/grad_norm"] > 0 for row in steps.values())


def test_trainer_and_engine_agree_on_log_probs(run: Run):
    for row in view(read_rows(run.path)).steps.values():
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 1e-3
        assert row["perf/update_weights_gb_per_s"] > 0
