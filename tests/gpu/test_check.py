"""The GPU check itself, with small sizes on the CPU: never dead code. What only CUDA has (expandable segments, the
context that stays on the card) is no part of this run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXPECTED = (
    "packed attention",
    "fused log-prob",
    "sleep: gradients",
    "sleep: optimizer",
    "sleep: weights",
    "training goes on after all slept",
    "bucket opened by another process",
    "training step, adamw",
    "training step, sr_adamw",
    "checkpoint",
)


def test_all_checks_hold_on_the_cpu() -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("check.py")), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert all(any(name in line for line in lines) for name in EXPECTED), done.stdout
