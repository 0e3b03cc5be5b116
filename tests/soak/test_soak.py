"""A short soak A in the suite: a loop of 20 steps, one fault of each of five kinds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colocate_grpo.demo.recipe import DemoPaths

REPOSITORY = Path(__file__).parents[2]
SMALL = ["rollout.prompts_per_step=4", "rollout.slots=32", "eval.every=10", "eval.sets.0.limit=32"]


@pytest.mark.timeout(1500)
def test_twenty_steps_with_five_faults_equal_the_uninterrupted_run(tmp_path: Path, demo_model: DemoPaths) -> None:
    log = tmp_path / "soak.log"
    # A mount namespace of its own: the small disk needs a mount, which must not outlive the test.
    command = [
        *("unshare", "--mount", "--map-root-user"), sys.executable, "-m", "tests.soak.soak_a",
        *("--work", str(tmp_path / "work"), "--model", str(demo_model.model), "--log", str(log)),
        *("--steps", "20", "--faults", "5", "--min-accuracy", "0"), *SMALL,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in log.read_text()
