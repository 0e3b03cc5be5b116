"""A numeric all-reduce over the cards of the run (over two CPU processes without one), with and without P2P.

4090s were seen to return wrong numbers over P2P: a run on them would train on noise.
"""

from __future__ import annotations

import os
import subprocess
import sys

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

MEND = "look at the NCCL messages with NCCL_DEBUG=INFO; ACS and IOMMU settings of the mainboard are the usual cause"
TIMEOUT_S = 120.0


def check(context: Context) -> Finding:
    backend, ranks = ("nccl", len(context.used)) if context.used else ("gloo", 2)
    if backend == "nccl" and ranks == 1:
        return ok("one card: nothing to reduce")
    already_off = context.environment.get("NCCL_P2P_DISABLE") == "1"
    problem = run_workers(backend, ranks, {})
    if problem is None:
        how = "" if backend == "gloo" else (" without P2P (NCCL_P2P_DISABLE=1)" if already_off else " with P2P")
        return ok(f"{backend} all-reduce over {ranks} processes is right{how}")
    if backend == "nccl" and not already_off and run_workers(backend, ranks, {"NCCL_P2P_DISABLE": "1"}) is None:
        return warn(
            f"all-reduce is wrong with P2P ({problem}) and right without",
            "NCCL_P2P_DISABLE=1 is set for the run",
            NCCL_P2P_DISABLE="1",
        )
    return fail(f"{backend} all-reduce over {ranks} processes: {problem}", MEND)


def run_workers(backend: str, ranks: int, environment: dict[str, str]) -> str | None:
    """None when the sums are right on every rank, else what went wrong."""
    command = [sys.executable, "-m", "colocate_grpo.doctor.allreduce_worker", backend, str(ranks)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1][:200] if lines else f"exit code {done.returncode}"
