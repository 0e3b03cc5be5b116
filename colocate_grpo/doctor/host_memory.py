"""Host RAM against the plan: what sleeps lies there, and a save gathers its states there."""

from __future__ import annotations

import psutil

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.doctor.planned import planned, without_plan

GIB = 2**30
SMALLER_STATE = "use train.optimizer.kind=sr_adamw, whose state is a third"
# Phase of the host plan -> what makes it smaller.
MENDS = {
    "asleep": f"set memory.backup_dir to a fast disk, or {SMALLER_STATE}",
    "train": "set algorithm.kl.coef=0 (no reference), or memory.backup_dir to a fast disk",
    "save": SMALLER_STATE,
    "load": f"{SMALLER_STATE}, or a larger parallel.tp with a smaller parallel.dp",
}


def check(context: Context) -> Finding:
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    what = f"{available / GIB:.1f} GiB of {total / GIB:.1f} GiB available"
    if context.config is None or not context.wants_gpu:
        return ok(what)
    plan = planned(context)
    if plan is None:
        return without_plan(what)
    host = plan.host
    what += f", the plan needs {host.total / GIB:.1f} ({host.fullest})"
    if host.total > total:
        return fail(what, MENDS[host.fullest])
    if host.total > available:
        return warn(what, f"close other programs, or: {MENDS[host.fullest]}")
    return ok(what)
