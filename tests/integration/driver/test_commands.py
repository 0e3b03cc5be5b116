"""`status`, `stop` and `checkpoints` on a live run and on an idle one, as a user types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest
from driver_runs import Run

from colocate_grpo.checkpoint.store import rollbacks
from colocate_grpo.observe.metrics import read_rows, view

pytestmark = pytest.mark.timeout(900)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from colocate_grpo.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def test_status_stop_and_checkpoints(run: Run) -> None:
    run.configure({1: {"kind": "pause", "step": 5}}, run={"steps": 8})
    driver = run.start()
    run.wait_for_step(5)
    live = json.loads(cli("status", str(run.dir), "--json").stdout)
    assert live["running"]
    assert live["driver"].startswith(f"{driver.pid} on")
    assert (live["phase"], live["step"], live["steps"], live["steps_done"]) == ("train", 5, 8, 5)
    assert live["disk"]["checkpoints"] == [1, 3]
    assert live["attempts"][0]["kind"] is None
    shown = cli("status", str(run.dir)).stdout
    assert f"driver {driver.pid} on" in shown
    assert "5 of 8 done" in shown
    assert "train: free 1.50 GiB" in shown
    for command in (["rollback", str(run.dir), "1"], ["prune", str(run.dir)]):
        refused = cli("checkpoints", *command)
        assert refused.returncode == 2
        assert "is running; end it first with `colocate-grpo stop" in refused.stderr

    stopping = subprocess.Popen(
        [sys.executable, "-c", "from colocate_grpo.cli import main; main()", "stop", str(run.dir)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    run.wait_for(lambda: (run.dir / "control/stop").exists())
    (run.dir / "control/go_on").touch()
    said, _ = stopping.communicate(timeout=300)
    assert stopping.returncode == 0
    assert "not running; it goes on from step" in said
    assert run.finish(driver) == 0
    assert run.outcomes() == ["stopped"]
    assert "not running" in cli("status", str(run.dir)).stdout
    run.set_in_the_run(steps=4)
    assert "6 done, run.steps is now 4" in cli("status", str(run.dir)).stdout
    run.set_in_the_run(steps=8)
    checkpoints(run)
    assert run.finish() == 0
    rolled_back(run)


def checkpoints(run: Run) -> None:
    newest = json.loads(run.read("checkpoints/step_000005/manifest.json"))["step"]
    assert cli("checkpoints", "pin", str(run.dir), "1").returncode == 0
    listed = json.loads(cli("checkpoints", "list", str(run.dir), "--verify", "--json").stdout)
    assert listed["complete"][0]["notes"] == ["pinned", "verified"]
    assert listed["complete"][-1]["step"] == newest
    assert "nothing to remove" in cli("checkpoints", "prune", str(run.dir), "--dry-run").stdout
    missing = cli("checkpoints", "rollback", str(run.dir), "2")
    assert missing.returncode == 2
    assert "no complete checkpoint of step 2" in missing.stderr
    (run.dir / "checkpoints/step_000005/loop.json").write_text('{"step": 4}')
    damaged = cli("checkpoints", "list", str(run.dir), "--verify")
    assert damaged.returncode == 1
    assert "sha256 differs" in damaged.stdout.replace("\n", " ")
    assert "back at step 1" in cli("checkpoints", "rollback", str(run.dir), "1").stdout
    told_at_once(run)


def told_at_once(run: Run) -> None:
    """A rollback by hand is in the record before anything trains again."""
    seen = json.loads(cli("status", str(run.dir), "--json").stdout)
    assert (seen["step"], seen["steps_done"], seen["last_step"]["step"]) == (2, 2, 1)
    assert "rolled back from step 6 to 1: by hand" in seen["warnings"][-1]
    assert [(event["step"], event["by"]) for event in run.events("rollback")] == [(1, "user")]
    again = cli("checkpoints", "rollback", str(run.dir), "1")
    assert again.returncode == 2
    assert "the run is at step 1; going back to step 1 changes nothing" in again.stderr


def rolled_back(run: Run) -> None:
    rows = read_rows(run.dir)
    assert [(r["step"], r["from"]) for r in rows if r["kind"] == "rollback"] == [(1, rollbacks(run.dir)[0].came_from)]
    assert len(run.events("rollback")) == 1
    assert [row["salt"] for row in view(rows).steps.values()] == [0, 0, 1, 1, 1, 1, 1, 1]


def test_stop_ends_what_a_killed_driver_and_its_guard_left(run: Run) -> None:
    run.configure({1: {"kind": "hang", "step": 1}})
    driver = run.start()
    run.wait_for_step(1)
    [guard] = [p for p in psutil.Process(driver.pid).children() if "colocate_grpo.processes" in p.cmdline()]
    guard.kill()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert run.living()
    said = cli("stop", str(run.dir)).stdout
    assert "left-over processes" in said
    run.assert_nothing_left()


def test_what_is_no_run_directory_is_said_in_one_line(run: Run) -> None:
    for command in (["status"], ["stop"], ["checkpoints", "list"]):
        done = cli(*command, str(run.dir))
        assert done.returncode == 2
        assert "no run directory (it has no config.yaml)" in done.stderr.replace("\n", " ")
