"""Why an attempt ended, and whether another one makes sense."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "finished", "stopped", "user_error", "oom", "engine", "guard_stop", "rollback", "crash", "hang", "interrupted"
]
RETRIED: frozenset[Kind] = frozenset({"engine", "crash", "hang"})
EXIT_CODES: dict[Kind, int] = {"finished": 0, "stopped": 0, "user_error": 2, "interrupted": 130}
CUDA_OOM = re.compile(
    r"(?:OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|NCCL.*out of memory)[^\n]*", re.I
)
# What `loop` logs, line by line: whatever stands before the last of these the ranks have outlived.
RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} rank \d+ [A-Z]+ [^\n]*$", re.M)
TRACEBACK = "Traceback"
KILLED = "exitcode: -9"
TRIED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]iB)")
HELP = {
    "rollout": "lower rollout.sglang.mem_fraction_static, or set memory.kv_dtype=fp8_e5m2",
    "eval": "lower rollout.sglang.mem_fraction_static, or set memory.kv_dtype=fp8_e5m2",
    "train": "lower train.max_tokens_per_microbatch, set train.recompute=true, or raise parallel.tp",
    "push": "lower rollout.bucket_mib",
    "save": "raise parallel.tp, or lower rollout.sglang.mem_fraction_static",
}
HELP_HOST = "set memory.backup_dir to a directory on a fast disk, lower reward.workers, or add memory or swap"
HELP_START = "lower rollout.sglang.mem_fraction_static or raise parallel.tp; `colocate-grpo plan` shows what fits"


@dataclass(frozen=True)
class Ending:
    """How an attempt ended; `step` is the step it was at, -1 where unknown."""

    kind: Kind
    message: str
    step: int = -1

    @property
    def retried(self) -> bool:
        return self.kind in RETRIED

    @property
    def failed(self) -> bool:
        return self.kind not in ("finished", "stopped", "interrupted")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.kind, 1)


def host_oom_kills() -> int:
    """How often this machine's kernel has ended a process for want of memory."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    return int(match[1]) if match else 0


def diagnose(report: dict[str, Any] | None, code: int, log: str, state: dict[str, Any], oom_kills: int) -> Ending:
    """The ending of an attempt that ended by itself.

    `report`: the loop's own exit report, if it could write one; `code`: exit code of torchrun; `log`: end of the
    output; `state`: last state.json; `oom_kills`: processes that the kernel ended for memory during the attempt.
    """
    step, phase = int(state.get("step", -1)), str(state.get("phase", "start"))
    kind = report["kind"] if report else None
    if kind in ("finished", "stopped", "user_error", "guard_stop", "rollback"):
        assert report is not None
        return Ending(kind, str(report.get("message", "")), int(report.get("step", step)))
    if oom_kills and KILLED in log:
        return Ending("oom", _host_oom(phase, step), step)
    said = f"{report.get('message', '')}\n{_last_tracebacks(log)}" if report else _last_tracebacks(log)
    if kind == "oom" or CUDA_OOM.search(said):
        return Ending("oom", _cuda_oom(phase, step, said), step)
    if report:
        return Ending(kind if kind in ("engine", "crash") else "crash", str(report.get("message", "")), step)
    return Ending("crash", f"{_cause(log, code)} (phase {phase}, step {step})", step)


def _host_oom(phase: str, step: int) -> str:
    return (
        f"out of host memory: the kernel ended a process of the run (phase {phase}, step {step}). "
        f"Not tried again with the same configuration: {HELP_HOST}"
    )


def _last_tracebacks(log: str) -> str:
    """What ended the ranks; a text in an earlier line, or of one that SIGKILL ended, says nothing of it."""
    last_words = RECORD.split(log)[-1]
    start = last_words.find(TRACEBACK)
    return last_words[start:] if start >= 0 and KILLED not in last_words else ""


def _cuda_oom(phase: str, step: int, said: str) -> str:
    amount = TRIED.search(said)
    wanted = f" while asking for {amount[1]}" if amount else ""
    return (
        f"out of GPU memory in phase {phase}, step {step}{wanted}. "
        f"Not tried again with the same configuration: {HELP.get(phase, HELP_START)}"
    )


def _cause(log: str, code: int) -> str:
    """The last exception in the output that is not torchrun's own, or the signal that ended a rank."""
    errors = re.findall(
        r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?:: [^\n]*)?)$", log, re.M
    )
    errors = [error for error in errors if "ChildFailedError" not in error]
    if errors:
        return errors[-1][:500]
    if signal := re.search(r"exitcode: -(\d+)", log) or re.search(r"exitcode\s*: -(\d+)", log):
        return f"a rank was ended by signal {signal[1]}"
    return f"torchrun ended with code {code}"
