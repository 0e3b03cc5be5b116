"""A Triton kernel, really compiled to machine code; launched too where there is a card."""

from __future__ import annotations

import subprocess
import sys

from colocate_grpo.doctor.finding import Context, Finding, fail, ok

TIMEOUT_S = 60.0


def check(context: Context) -> Finding:
    launch = bool(context.used)
    command = [sys.executable, "-m", "colocate_grpo.doctor.triton_worker", *(["launch"] if launch else [])]
    try:
        done = subprocess.run(command, env=dict(context.environment), capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return fail(f"no kernel after {TIMEOUT_S:.0f} s", "is the Triton cache on a network disk? set TRITON_CACHE_DIR")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return fail(f"Triton: {lines[-1][:200]}", "apt install gcc python3-dev; reinstall triton with torch")
    return ok(done.stdout.strip().splitlines()[-1])
