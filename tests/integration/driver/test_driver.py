"""The driver over real process trees: every way an attempt can end, and what follows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from driver_runs import Run

from colocate_grpo.checkpoint.store import CheckpointStore, rollbacks
from colocate_grpo.config_file import load_config
from colocate_grpo.observe.metrics import read_rows, view

pytestmark = pytest.mark.timeout(900)


def test_killed_raising_and_hanging_ranks_are_retried_and_the_run_finishes(run: Run) -> None:
    faults = {1: {"kind": "kill", "step": 2}, 2: {"kind": "raise", "step": 4}, 3: {"kind": "hang", "step": 5}}
    run.configure(faults, parallel={"dp": 2}, run={"hang_timeout": 20})
    assert run.finish() == 0, run.output()
    assert run.outcomes() == ["crash", "crash", "hang", "finished"]
    messages = [event["message"] for event in run.events("attempt_end")]
    assert "signal 9" in messages[0]
    assert "the engine does not answer" in messages[1]
    assert "no progress for 20 s (run.hang_timeout) in phase train, step 5" in messages[2]
    stacks = run.read("logs/attempt_3.log").partition("stacks of all ranks")[2]
    assert "in fail" in stacks
    assert "in wait_for_rank_0" in stacks, "both ranks show where they are"
    assert not list((run.dir / "logs").glob("stacks_*")), "nothing but logs stays"
    assert sorted(view(read_rows(run.dir)).steps) == list(range(6))


def test_attempts_without_a_new_checkpoint_are_limited(run: Run) -> None:
    faults = {n: {"kind": "raise", "step": 1} for n in range(1, 9)}
    run.configure(faults, run={"max_attempts": 2})
    assert run.finish() == 1
    assert run.outcomes() == ["crash", "crash"]
    assert "2 attempts in a row ended without a new checkpoint" in run.output()
    assert "RuntimeError: the engine does not answer" in run.output(), "ends with the tail of the log"


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ({"kind": "user_error", "message": "data.train: no such file"}, 2, "data.train: no such file"),
        ({"kind": "cuda_oom"}, 1, "train.max_tokens_per_microbatch"),
        ({"kind": "guard_stop", "message": "loss is nan"}, 1, "loss is nan"),
    ],
)
def test_what_another_attempt_cannot_mend_is_not_retried(run: Run, fault: dict, code: int, said: str) -> None:
    run.configure({1: {"step": 3, **fault}})
    assert run.finish() == code
    assert len(run.outcomes()) == 1
    assert said in run.output()
    assert "\nerror: " in f"\n{run.output()}"
    if fault["kind"] == "cuda_oom":
        assert "in phase train, step 3 while asking for 3.25 GiB" in run.output()


def test_one_signal_stops_cleanly_and_the_same_command_goes_on(run: Run) -> None:
    run.configure({1: {"kind": "pause", "step": 3}})
    driver = run.start()
    run.wait_for_step(3)
    driver.send_signal(signal.SIGTERM)
    run.wait_for(lambda: (run.dir / "control/stop").exists())
    (run.dir / "control/go_on").touch()
    assert run.finish(driver) == 0
    assert run.outcomes() == ["stopped"]
    newest = CheckpointStore(run.dir, load_config(run.config_path).checkpoint).newest()
    assert newest is not None
    assert newest.step == 3
    assert run.finish() == 0
    assert run.outcomes() == ["stopped", "finished"]


def test_a_second_signal_leaves_at_once(run: Run) -> None:
    run.configure({1: {"kind": "hang", "step": 3}})
    driver = run.start()
    run.wait_for_step(3)
    driver.send_signal(signal.SIGINT)
    run.wait_for(lambda: (run.dir / "control/stop").exists())
    driver.send_signal(signal.SIGINT)
    assert run.finish(driver, timeout_s=120) == 130
    assert run.outcomes() == ["interrupted"]


def test_a_killed_driver_takes_everything_with_it_and_the_same_command_resumes(run: Run) -> None:
    run.configure({1: {"kind": "hang", "step": 3}})
    driver = run.start()
    run.wait_for_step(3)
    assert len(run.living()) >= 3
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    run.assert_nothing_left(within_s=120)
    assert run.finish() == 0
    assert run.outcomes() == ["finished"]


def test_a_second_driver_of_the_same_run_is_refused(run: Run) -> None:
    run.configure({1: {"kind": "pause", "step": 1}})
    first = run.start()
    run.wait_for_step(1)
    assert run.start().wait(timeout=300) != 0
    assert f"already running (process {first.pid} on" in run.output()
    (run.dir / "control/go_on").touch()
    assert run.finish(first) == 0


def test_a_stopped_rank_is_found_by_the_watchdog(run: Run) -> None:
    run.configure({1: {"kind": "pause", "step": 3}}, run={"hang_timeout": 15})
    driver = run.start()
    run.wait_for_step(3)
    [rank] = run.ranks()
    rank.send_signal(signal.SIGSTOP)
    assert run.finish(driver) == 0
    assert run.outcomes() == ["hang", "finished"]


def test_a_start_that_hangs_and_an_end_that_hangs(run: Run) -> None:
    lingering = {"kind": "engine", "step": 3, "message": "all engines are dead", "linger": True}
    run.configure({1: {"kind": "start_hang"}, 2: lingering}, run={"start_timeout": 30, "hang_timeout": 10})
    assert run.finish() == 0
    assert run.outcomes() == ["hang", "engine", "finished"]
    assert "no progress for 30 s (run.start_timeout) in the start" in run.output()


def test_a_guard_rolls_back_salts_the_seeds_and_stops_after_its_limit(run: Run) -> None:
    fault = {"kind": "rollback", "step": 5, "message": "entropy rose"}
    guards = {"max_rollbacks": 2, "step": {"window": 2}}
    run.configure({1: fault, 2: fault, 3: fault}, guards=guards)
    assert run.finish() == 1
    assert run.outcomes() == ["rollback", "rollback", "rollback"]
    assert "rolled back 2 times already (guards.max_rollbacks=2)" in run.output()
    assert [(entry.came_from, entry.to, entry.by) for entry in rollbacks(run.dir)] == [(5, 3, "guard")] * 2
    rows = read_rows(run.dir)
    assert [(r["step"], r["from"], r["rollback"]) for r in rows if r["kind"] == "rollback"] == [(3, 5, 1), (3, 5, 2)]
    assert [row["salt"] for row in view(rows).steps.values()] == [0, 0, 0, 0, 2], "step 4 was done anew each time"
    assert len(run.events("rollback")) == 2
    assert run.events("checkpoint_skipped") == [], "what was rolled back on purpose is no finding"


def test_a_damaged_newest_checkpoint_is_named_and_more_steps_go_on_from_the_one_before(run: Run) -> None:
    schedule = {"optimizer": {"schedule": "linear"}}
    run.configure(run={"steps": 4}, train=schedule)
    assert run.finish() == 0
    (run.dir / "checkpoints/step_000003/loop.json").write_text('{"step": 2}')
    run.configure(run={"steps": 6}, train=schedule)
    assert run.finish() == 0
    [skipped] = run.events("checkpoint_skipped")
    assert skipped["path"] == "step_000003"
    assert "sha256" in skipped["reason"]
    steps = [row["step"] for row in read_rows(run.dir) if row["kind"] == "step"]
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5]
    assert run.events("config_change")[0]["changes"] == {"run.steps": [4, 6]}
    assert "run.steps changed from 4 to 6: the learning rate's schedule follows it" in run.output()


def test_another_identity_is_refused_and_nothing_changes(run: Run) -> None:
    run.configure(run={"steps": 2})
    assert run.finish() == 0
    before = run.read("config.yaml")
    run.configure(run={"steps": 2, "seed": 7})
    assert run.start().wait(timeout=300) != 0
    assert "these options may not change: run.seed (is 0, asked for 7)" in run.output()
    assert run.read("config.yaml") == before


def test_max_hours_and_until(run: Run) -> None:
    run.configure({1: {"kind": "pause", "step": 1}}, run={"max_hours": 1e-3})
    (run.dir / "control").mkdir()
    driver = run.start()
    run.wait_for(lambda: (run.dir / "control/stop").exists(), what="the deadline")
    (run.dir / "control/go_on").touch()
    assert run.finish(driver) == 0
    assert run.events("stop_requested")[0]["reason"] == "run.max_hours=0.001"
    run.configure(run={"until": "tomorrow"})
    assert run.start().wait(timeout=300) != 0
    assert "run.until: 'tomorrow' is no ISO 8601 time" in run.output()


def test_a_full_disk_is_told_in_one_line_at_the_start_and_waited_for_later(tmp_path: Path) -> None:
    script = Path(__file__).with_name("full_disk.py")
    done = subprocess.run(  # in a mount namespace of its own: the small disk must not outlive the test
        ["unshare", "--mount", "--map-root-user", sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_processes_of_the_user_are_left_alone(run: Run) -> None:
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, "COLOCATE_RUN_ID": "another run"})
    run.configure({1: {"kind": "kill", "step": 1}})
    assert run.finish() == 0
    assert bystander.poll() is None
    assert psutil.Process(bystander.pid).create_time() < time.time()
    bystander.kill()
    bystander.wait()
