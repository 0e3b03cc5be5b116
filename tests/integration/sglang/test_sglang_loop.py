"""The demo on a real server of two workers: a whole run, in the middle of which the server is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from colocate_grpo import processes
from colocate_grpo.demo.recipe import make_demo
from colocate_grpo.demo.warmup import WarmUp
from colocate_grpo.observe.metrics import read_rows, view
from colocate_grpo.observe.state import read_state

CONFIG = Path(__file__).parents[3] / "configs" / "demo_sglang.yaml"
TIMEOUT_S = 900.0
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of three steps; its engine died in the rollout of the second one."""
    root = tmp_path_factory.mktemp("sglang_loop")
    demo = make_demo(root / "demo_model", seed=0, plan=WarmUp(clean_steps=20, careless_steps=2, threads=1))
    run_dir = root / "run"
    overrides = [
        f"run.dir={run_dir}", f"model.path={demo.model}", f"data.train={demo.train}",
        f"eval.sets.0.path={demo.evaluation}",
        "run.steps=3", "run.backoff=0.1s", "rollout.prompts_per_step=16", "rollout.verify_weights_every=1",
        "checkpoint.every=1", "eval.every=0", "eval.at_start=false", "train.optimizer.warmup_steps=1",
    ]  # fmt: skip
    command = [sys.executable, "-c", "from colocate_grpo.cli import main; main()", "train", str(CONFIG), *overrides]
    with (root / "train.log").open("wb") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _kill_the_engine_in_step(1, run_dir, driver)
        assert driver.wait(timeout=TIMEOUT_S) == 0, (root / "train.log").read_text()[-6000:]
        assert processes.find(processes.run_id(run_dir)) == []
    finally:
        driver.kill()
        processes.end(processes.run_id(run_dir), grace_s=0.0)
    return run_dir


def _kill_the_engine_in_step(step: int, run_dir: Path, driver: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not ((state := read_state(run_dir)).get("step") == step and state.get("phase") == "rollout"):
        assert driver.poll() is None, (run_dir.parent / "train.log").read_text()[-6000:]
        assert time.monotonic() < deadline, state
        time.sleep(0.002)
    tree = processes.find(processes.run_id(run_dir))
    os.kill(next(p.pid for p in tree if _is_server(p)), signal.SIGKILL)


def _is_server(process: psutil.Process) -> bool:
    return "sglang.launch_server" in process.cmdline()


def test_the_lost_engine_ends_its_attempt_with_a_clear_message(run_dir):
    end = json.loads((run_dir / "attempts" / "1.exit.json").read_text())
    assert (end["kind"], end["step"]) == ("engine", 1)
    assert "all 1 engines are lost; the last one: engine 0 is lost" in end["message"]


def test_every_step_is_there_with_versions_that_advance_by_one(run_dir):
    steps = view(read_rows(run_dir)).steps
    assert sorted(steps) == [0, 1, 2]
    assert [steps[i]["weight_version"] for i in range(3)] == [0, 1, 2]
    assert all(row["rollout/failed_ratio"] == 0 for row in steps.values())


def test_trainer_and_engine_agree_on_log_probs(run_dir):
    for row in view(read_rows(run_dir)).steps.values():
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 1e-3
        assert row["perf/update_weights_gb_per_s"] > 0
