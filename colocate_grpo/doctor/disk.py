"""Free space for the run directory against the plan: kept checkpoints and the one being written."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.doctor.planned import planned, without_plan

GIB = 2**30


def check(context: Context) -> Finding:
    config, plan = context.required_config, planned(context)
    place = _existing(config.run_dir)
    free = shutil.disk_usage(place).free
    if plan is None:
        return without_plan(f"{free / GIB:.1f} GiB free at {place}")
    here = _size(config.run_dir)
    needed = plan.disk.total + int(config.checkpoint.min_free_gib * GIB) - here
    what = f"{free / GIB:.1f} GiB free at {place}, the run still needs up to {needed / GIB:.1f}"
    if free + here < 2 * plan.disk.checkpoint:
        return fail(what, "put run.dir on another disk: one checkpoint and its successor do not fit")
    if free < needed:
        return warn(what, "lower checkpoint.keep_last or keep_best, run.dump_rollouts=false, or use another run.dir")
    return ok(what)


def _existing(path: Path) -> Path:
    return next(p for p in [path.absolute(), *path.absolute().parents] if p.exists())


def _size(directory: Path) -> int:
    """Bytes below `directory`. A running run removes files and directories meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
