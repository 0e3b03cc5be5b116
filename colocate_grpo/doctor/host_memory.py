"""Host RAM against the plan: what sleeps lies there."""

from __future__ import annotations

import psutil

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.doctor.planned import planned

GIB = 2**30


def check(context: Context) -> Finding:
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    if context.config is None or not context.wants_gpu:
        return ok(f"{available / GIB:.1f} GiB of {total / GIB:.1f} GiB available")
    needed = planned(context).host.total
    what = f"{available / GIB:.1f} GiB of {total / GIB:.1f} GiB available, the plan needs {needed / GIB:.1f}"
    if needed > total:
        return fail(what, "set memory.backup_dir to a fast disk, or use train.optimizer.kind=sr_adamw")
    if needed > available:
        return warn(what, "close other programs, or set memory.backup_dir to a fast disk")
    return ok(what)
