"""Processes of runs whose driver is gone: SGLang's schedulers outlive it in sessions of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

from colocate_grpo.doctor.finding import Context, Finding, fail, ok
from colocate_grpo.processes import RUN_ID, start_ticks


def check(context: Context) -> Finding:
    found = list(find_orphans())
    if found:
        shown = ", ".join(f"{process.pid} ({process.name()})" for process in found[:5])
        return fail(
            f"{len(found)} processes of an earlier run whose driver is gone: {shown}",
            "colocate-grpo stop RUN_DIR, or end them by id: kill " + " ".join(str(p.pid) for p in found),
        )
    return ok("no process of an earlier run is left")


def find_orphans() -> Iterator[psutil.Process]:
    """Processes of this user with a run's tag (`run:driver pid:start in ticks[:...]`) whose driver no longer runs."""
    for process in psutil.process_iter():
        try:
            tag = process.environ().get(RUN_ID, "")
            if tag and not driver_runs(tag) and process.uids().real == os.getuid():
                yield process
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue


def driver_runs(tag: str) -> bool:
    """False where the tag names a driver that is gone; a tag without a driver proves nothing."""
    fields = tag.split(":")
    if len(fields) < 3 or not (fields[1].isdigit() and fields[2].isdigit()):
        return True
    return start_ticks(int(fields[1])) == int(fields[2])
