"""launch/run_4090.sh as a user types it: in a real tmux, under a real systemd user instance, and without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from colocate_grpo import processes
from colocate_grpo.demo.recipe import DemoPaths
from colocate_grpo.observe.events import read_events

pytestmark = pytest.mark.timeout(1500)
TIMEOUT_S = 1200.0
REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "launch" / "run_4090.sh"
SMALL = [
    "run.steps=3", "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.slots=8", "checkpoint.every=1",
    "checkpoint.min_free_gib=0", "eval.every=0", "eval.at_start=false", "train.optimizer.warmup_steps=1",
]  # fmt: skip


class Launch:
    """The script with a tmux server, a home and a run directory of its own."""

    def __init__(self, directory: Path, demo: DemoPaths):
        self.home, self.run_dir = directory, directory / "run"
        self.overrides = [
            f"run.dir={self.run_dir}", f"model.path={demo.model}", f"data.train={demo.train}",
            f"eval.sets.0.path={demo.evaluation}", *SMALL,
        ]  # fmt: skip
        self.environment = {
            **os.environ, "TMUX_TMPDIR": str(directory), "COLOCATE_BIN": str(Path(sys.executable).parent),
            "XDG_CONFIG_HOME": str(directory), "TMUX": "",
        }  # fmt: skip

    def type(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.shell("bash", str(SCRIPT), *arguments)

    def start(self, *more: str) -> str:
        done = self.type(*(a for a in more if a.startswith("--")), "configs/demo.yaml", *self.overrides,
                         *(a for a in more if "=" in a))  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shell(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S)

    def stop(self, attempt: int) -> None:
        """Once this attempt has begun: a run that is stopped before has no end of an attempt to tell of."""
        deadline = time.monotonic() + TIMEOUT_S
        while attempt not in self.attempts():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        done = self.shell(f"{self.environment['COLOCATE_BIN']}/colocate-grpo", "stop", str(self.run_dir))
        assert done.returncode == 0, done.stderr

    def attempts(self) -> list[int]:
        return [event["attempt"] for event in read_events(self.run_dir) if event["kind"] == "attempt_start"]

    def outcomes(self) -> list[str]:
        return [event["outcome"] for event in read_events(self.run_dir) if event["kind"] == "attempt_end"]

    def living(self) -> list[Any]:
        return processes.find(processes.run_id(self.run_dir))


@pytest.fixture
def launch(tmp_path: Path, demo: DemoPaths) -> Iterator[Launch]:
    launch = Launch(tmp_path, demo)
    yield launch
    launch.shell("tmux", "kill-server")
    processes.end(processes.run_id(launch.run_dir), 0)


def test_tmux_start_again_stop_and_resume(launch: Launch) -> None:
    assert shutil.which("tmux"), "the launch tests need tmux: apt-get install tmux"
    with ThreadPoolExecutor() as at_once:
        said, second = sorted(at_once.map(launch.start, ["run.steps=1000"] * 2), key=lambda text: "started" not in text)
    assert f"{launch.run_dir} started in tmux" in said
    assert f"{launch.run_dir} is already running" in second
    assert "tmux attach -t colocate-demo" in said
    assert launch.shell("tmux", "has-session", "-t", "=colocate-demo").returncode == 0
    again = launch.start("run.steps=1000")
    assert f"{launch.run_dir} is already running" in again
    assert "tmux attach -t colocate-demo" in again
    launch.stop(attempt=1)
    assert launch.outcomes() == ["stopped"]
    assert launch.living() == []
    assert f"{launch.run_dir} resumed in tmux" in launch.start("run.steps=1001")
    launch.stop(attempt=2)
    assert launch.outcomes() == ["stopped", "stopped"]
    assert launch.living() == []
    assert launch.shell("tmux", "list-windows", "-t", "=colocate-demo").stdout.count("\n") == 1, (
        "one window, used again"
    )


def test_without_a_gpu_doctor_says_what_is_missing_and_nothing_is_started(launch: Launch) -> None:
    done = launch.type(f"run.dir={launch.run_dir}")
    assert done.returncode == 1
    failures = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert any(line.split()[1] == "gpus" for line in failures)
    assert "doctor found what keeps this run from working" in done.stderr
    assert launch.shell("tmux", "has-session").returncode != 0
    assert not launch.run_dir.exists()


def test_a_wrong_configuration_is_one_line(launch: Launch) -> None:
    done = launch.type("configs/demo.yaml", "run.stepps=3")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("run.stepps: unknown key (did you mean steps?)")


SYSTEMD = "/lib/systemd/systemd"


@pytest.mark.skipif(os.getuid() != 0 or not Path(SYSTEMD).exists(), reason="needs systemd, and root to give it a /run")
def test_systemd_brings_back_a_killed_driver_and_stops_cleanly(launch: Launch) -> None:
    script = Path(__file__).with_name("systemd_run.sh")
    arguments = [str(SCRIPT), str(launch.home), str(launch.run_dir), "configs/demo.yaml", *launch.overrides]
    done = launch.shell("unshare", "--mount", "bash", str(script), *arguments, "run.steps=1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{launch.run_dir} started in systemd" in done.stdout
    assert f"{launch.run_dir} is already running" in done.stdout
    assert "journalctl --user -fu colocate-grpo-demo.service" in done.stdout
    assert launch.outcomes() == ["stopped"], "the killed driver's attempt has no end, the next one has a clean one"
    assert launch.attempts() == [1, 2]
    assert launch.living() == []
