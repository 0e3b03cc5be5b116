"""Limits of this shell: open files (sockets, shared tensors) and processes."""

from __future__ import annotations

import resource

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

FILES_NEEDED, FILES_WANTED, PROCESSES_WANTED = 1024, 65_536, 4096


def check(context: Context) -> Finding:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    what = f"open files {_shown(files)} (hard {_shown(hard)}), processes {_shown(processes)}"
    if _below(files, FILES_NEEDED):
        return fail(what, f"ulimit -n {FILES_WANTED} (or /etc/security/limits.conf)")
    if _below(files, FILES_WANTED) and _below(hard, FILES_WANTED):
        return warn(what, f"raise the hard limit to {FILES_WANTED} in /etc/security/limits.conf")
    if _below(processes, PROCESSES_WANTED):
        return warn(what, f"ulimit -u {PROCESSES_WANTED}: engines, ranks and workers start many threads")
    return ok(what)


def _below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
