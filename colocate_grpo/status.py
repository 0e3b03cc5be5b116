"""`status` and `stop`: a run seen, and ended, from another shell through its files alone."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from colocate_grpo import processes
from colocate_grpo.checkpoint.files import bytes_below
from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.errors import UserError
from colocate_grpo.observe.events import read_events
from colocate_grpo.observe.jsonl import Row
from colocate_grpo.observe.metrics import StepView, is_number, read_rows, view
from colocate_grpo.run_directory import RunDirectory

RECENT_STEPS = 10
POLL_S = 0.2
STOP_MARGIN_S = 60.0
GRACE_S = 5.0
LAST_METRICS = (
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "train/entropy_loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "perf/step_time",
)


class StopTimeout(UserError):
    """The run did not end in the time that it should need at most."""

    exit_code = 1


def run_status(run_dir: Path, *, json_out: bool) -> int:
    """Print what the run is doing; exit code 0. DataError where there is no run."""
    snapshot = take_snapshot(RunDirectory(run_dir).require())
    if json_out:
        print(json.dumps(snapshot, indent=1))
    else:
        Console(highlight=False).print(_table(snapshot))
    return 0


def run_stop(run_dir: Path) -> int:
    """Ask a running run to save and end, and wait for it; end what a dead one has left behind."""
    run = RunDirectory(run_dir).require()
    if run.is_running():
        _stop_running(run)
    left = processes.end(processes.run_id(run.path), GRACE_S)
    newest = CheckpointStore(run.path, run.config().checkpoint).newest()
    steps = run.config().run.steps
    kept = "; no checkpoint yet"
    if newest:
        kept = "; finished" if newest.step + 1 >= steps else f"; it goes on from step {newest.step + 1}"
    print(f"{run.path}: not running{kept}" + (f" (ended {len(left)} left-over processes)" if left else ""))
    return 0


def take_snapshot(run: RunDirectory) -> dict[str, Any]:
    """Everything `status` shows, as plain values; seconds, bytes and shares unless the name says otherwise."""
    config, state, rows, running = run.config(), run.state(), read_rows(run.path), run.is_running()
    counted = view(rows)
    return {
        "run": config.run.name,
        "directory": str(run.path),
        "running": running,
        "driver": run.holder() if running else None,
        "stopping": run.stop_reason() if running else None,
        "phase": _phase(run, state) if running else "not running",
        "step": state.get("step") if running else counted.next_step,
        "steps": config.run.steps,
        "steps_done": len(counted.steps),
        "rollout": state.get("rollout") if running and state.get("phase") in ("rollout", "eval") else None,
        "last_sign_of_life_s": round(time.time() - state["time"], 1) if "time" in state else None,
        "eta_s": _eta(config, rows, counted) if running else None,
        "last_step": _last_step(counted),
        "evaluations": _last_evaluations(counted),
        "memory": _memory(counted),
        "disk": _disk(run, config),
        "attempts": [_attempt(run, number) for number in range(1, run.last_attempt() + 1)],
        "warnings": _warnings(run),
    }


def _stop_running(run: RunDirectory) -> None:
    limit = run.config().run.hang_timeout + STOP_MARGIN_S
    run.ask_to_stop("`colocate-grpo stop`")
    print(f"{run.path}: asked process {run.holder()} to save and stop", flush=True)
    phase, progress, since = None, None, time.monotonic()
    while run.is_running():
        state = run.state()
        if state.get("phase") != phase:
            phase = state.get("phase")
            print(f"  phase {phase}, step {state.get('step')}", flush=True)
        if state.get("progress") != progress:
            progress, since = state.get("progress"), time.monotonic()
        if time.monotonic() - since > limit:
            raise StopTimeout(
                f"{run.path}: still running {limit:.0f} s after its last progress; "
                f"send SIGTERM twice to process {run.holder()}. End of the log:\n{run.log_tail(run.last_attempt())}"
            )
        time.sleep(POLL_S)


def _phase(run: RunDirectory, state: dict[str, Any]) -> str:
    """`start` also while the last words are those of an earlier attempt."""
    return str(state.get("phase", "start")) if state.get("attempt") == run.last_attempt() else "start"


def _eta(config: Config, rows: list[Row], counted: StepView) -> float | None:
    """Seconds to the end at the pace of the last steps, evaluations included."""
    steps, times = counted.series("perf/step_time")
    if not steps:
        return None
    evaluations = [
        row["perf/eval_time"] for row in rows if row["kind"] == "eval" and is_number(row.get("perf/eval_time"))
    ]
    remaining = config.run.steps - 1 - steps[-1]
    due = remaining // config.eval.every if config.eval.every else 0
    evaluating = statistics.median(evaluations[-RECENT_STEPS:]) * due if evaluations else 0.0
    return round(remaining * statistics.median(times[-RECENT_STEPS:]) + evaluating, 1)


def _last_step(counted: StepView) -> dict[str, Any]:
    if counted.last_step is None:
        return {}
    row = counted.steps[counted.last_step]
    return {"step": counted.last_step, **{name: row[name] for name in LAST_METRICS if is_number(row.get(name))}}


def _memory(counted: StepView) -> dict[str, dict[str, float]]:
    """Of each phase of the last step what rank 0 measured when it began, in GiB: `memory/PHASE/WHAT_gib`."""
    found: dict[str, dict[str, float]] = {}
    row = counted.steps[counted.last_step] if counted.last_step is not None else {}
    for name, value in row.items():
        if name.startswith("memory/") and name.endswith("_gib") and name.count("/") == 2 and is_number(value):
            _, phase, what = name.removesuffix("_gib").split("/")
            found.setdefault(phase, {})[what] = value
    return found


def _last_evaluations(counted: StepView) -> dict[str, dict[str, Any]]:
    """Of each evaluation set, the first and the last accuracy."""
    found: dict[str, dict[str, Any]] = {}
    for point in sorted(counted.evaluations, key=lambda p: p.updates):
        entry = found.setdefault(point.name, {"first": point.accuracy})
        entry.update(last=point.accuracy, updates=point.updates, stderr=point.values.get("stderr"))
    return found


def _disk(run: RunDirectory, config: Config) -> dict[str, Any]:
    scan = CheckpointStore(run.path, config.checkpoint).scan()
    return {
        "free": shutil.disk_usage(run.path).free,
        "run": bytes_below(run.path),
        "checkpoints": [checkpoint.step for checkpoint in scan.complete],
        "checkpoint_bytes": sum(checkpoint.size for checkpoint in scan.complete),
        "skipped": [str(skipped) for skipped in scan.skipped],
    }


def _attempt(run: RunDirectory, number: int) -> dict[str, Any]:
    values = run.attempt(number)
    ended = values.get("ended")
    lasted = (ended or time.time()) - values["started"] if "started" in values else None
    return {"attempt": number, "seconds": lasted, "kind": values.get("kind"), "message": values.get("message")}


def _warnings(run: RunDirectory) -> list[str]:
    """The latest events that a person should know of."""
    told = []
    for event in read_events(run.path):
        if event["kind"] == "guard":
            told.append(
                f"step {event.get('step')}: guard {event.get('name')} ({event.get('action')}): {event.get('message')}"
            )
        elif event["kind"] == "rollback":
            told.append(f"rolled back from step {event.get('from')} to {event.get('step')}: {event.get('reason')}")
        elif event["kind"] in ("engine_lost", "save_failed", "checkpoint_skipped"):
            detail = event.get("error") or event.get("reason") or event.get("message") or ""
            told.append(f"{event['kind']}: {event.get('path') or event.get('engine') or ''} {detail}".strip())
    return told[-5:]


def _table(s: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(s):
        table.add_row(name, text)
    return table


def _lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("run", f"{s['run']} in {s['directory']}"), ("state", _state(s)), ("step", _step(s))]
    if s["last_step"]:
        lines.append(("last step", "  ".join(f"{k.split('/', 1)[-1]} {v:.4g}" for k, v in s["last_step"].items())))
    lines += [("eval", f"{name}: {_accuracy(entry)}") for name, entry in s["evaluations"].items()]
    for phase, figures in s["memory"].items():
        lines.append(("memory", f"{phase}: " + ", ".join(f"{what} {gib:.2f} GiB" for what, gib in figures.items())))
    lines.append(("disk", _disk_line(s["disk"])))
    lines += [("skipped", text) for text in s["disk"]["skipped"]]
    lines += [
        ("attempt", _attempt_line(entry, s["running"] and entry is s["attempts"][-1])) for entry in s["attempts"][-3:]
    ]
    return lines + [("warning", text) for text in s["warnings"]]


def _state(s: dict[str, Any]) -> str:
    if not s["running"]:
        return "not running"
    silent = f", last sign of life {_duration(s['last_sign_of_life_s'])} ago" if s["last_sign_of_life_s"] else ""
    stopping = f", stopping ({s['stopping']})" if s["stopping"] else ""
    return f"{s['phase']} (driver {s['driver']}{silent}){stopping}"


def _step(s: dict[str, Any]) -> str:
    done, planned = s["steps_done"], s["steps"]
    text = f"{done} of {planned} done" if done <= planned else f"{done} done, run.steps is now {planned}"
    if s["rollout"]:
        r = s["rollout"]
        text += f", {s['phase']} {r.get('done')}/{r.get('total')} at {r.get('tokens_per_s', 0):.0f} tokens/s"
    return text + (f", {_duration(s['eta_s'])} to go" if s["eta_s"] is not None else "")


def _accuracy(entry: dict[str, Any]) -> str:
    error = f" ± {entry['stderr']:.3f}" if entry.get("stderr") is not None else ""
    return f"{entry['last']:.3f}{error} after {entry['updates']} updates (first {entry['first']:.3f})"


def _disk_line(disk: dict[str, Any]) -> str:
    steps = ", ".join(map(str, disk["checkpoints"])) or "none"
    return (
        f"{disk['free'] / 2**30:.1f} GiB free, {disk['run'] / 2**30:.2f} GiB used by the run; "
        f"checkpoints of steps: {steps} ({disk['checkpoint_bytes'] / 2**30:.2f} GiB)"
    )


def _attempt_line(entry: dict[str, Any], running: bool) -> str:
    running = running and entry["kind"] is None
    kind = entry["kind"] or ("running" if running else "cut off with its driver")
    known = entry["seconds"] is not None and (entry["kind"] or running)
    lasted = f"{' for' if running else ' after'} {_duration(entry['seconds'])}" if known else ""
    return f"{entry['attempt']}: {kind}{lasted}" + (f" ({entry['message']})" if entry["message"] else "")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
