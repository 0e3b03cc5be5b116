"""What happened to the run, in order: the engineering log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from colocate_grpo.observe.jsonl import Row
from colocate_grpo.observe.metrics import Removal
from colocate_grpo.report.markdown import duration, moment, number, percent, step_ranges, text_table
from colocate_grpo.report.record import RunRecord

# Regular work, told as sums.
ROUTINE = ("save", "rotate", "eval")
# Told elsewhere in the report, or in every row.
HIDDEN = ("kind", "time", "attempt", "versions", "hardware", "commit", "data")
NAMES = {
    "attempt_start": "start",
    "attempt_end": "end of attempt",
    "run_end": "**end of run**",
    "config_change": "option changed",
    "engine_lost": "**engine lost**",
    "engine_restarted": "engine restarted",
    "save_failed": "**save failed**",
    "checkpoint_skipped": "**checkpoint skipped**",
    "stop_requested": "stop requested",
    "rollback": "**rollback**",
    "guard": "**guard**",
}
MAX_ROWS = 200
MAX_TEXT = 300


def chronicle_section(run: RunRecord) -> str:
    """The section on starts, resumes, losses, guards, rollbacks and saves."""
    parts = ["## Engineering log"]
    if run.events:
        parts += [_counts(run), _told(run), *_saves(run)]
    else:
        parts.append("No events are recorded.")
    if run.counted.removals:
        parts += ["### What a rollback or a resume took away", _removals(run.counted.removals)]
    return "\n\n".join(parts)


def describe(fields: Row) -> str:
    """The fields of an event as `name value`, short."""
    shown = {key: value for key, value in fields.items() if key not in HIDDEN and value not in (None, "", [], {})}
    text = "; ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in shown.items())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _counts(run: RunRecord) -> str:
    counts = Counter(str(event.get("kind")) for event in run.events)
    return "Events: " + ", ".join(f"{kind.replace('_', ' ')} {number(n)}" for kind, n in counts.most_common()) + "."


def _told(run: RunRecord) -> str:
    told = [event for event in run.events if event.get("kind") not in ROUTINE]
    shown = told if len(told) <= MAX_ROWS else [*told[: MAX_ROWS // 2], *told[-MAX_ROWS // 2 :]]
    rows = [[moment(e["time"]), str(e.get("attempt", "")), _name(e), describe(e)] for e in shown]
    text = text_table(["time (UTC)", "attempt", "event", "details"], rows)
    left_out = len(told) - len(shown)
    return f"{text}\n\n{left_out} events in the middle are left out here." if left_out else text


def _name(event: Row) -> str:
    kind = str(event.get("kind"))
    return NAMES.get(kind, kind.replace("_", " "))


def _saves(run: RunRecord) -> Iterator[str]:
    steps = sorted({event["step"] for event in run.of_kind("save") if "step" in event})
    if steps:
        seconds = [row["perf/save_time"] for row in run.steps if row.get("perf/save_time")]
        mean = f", {duration(sum(seconds) / len(seconds))} each on average" if seconds else ""
        yield f"Saved after step {step_ranges(steps)} ({len(run.of_kind('save'))} saves{mean})."
    there = run.checkpoint_steps()
    yield f"Checkpoints there now: step {step_ranges(there)}." if there else "No checkpoint is there now."


def _removals(removals: list[Removal]) -> str:
    rows = [
        [moment(r.time), r.cause, str(r.attempt), _kept(r), step_ranges(r.steps) or "none", _evaluations(r), r.reason]
        for r in removals
    ]
    header = ["time (UTC)", "cause", "attempt", "went back to", "steps taken away", "evaluations taken away", "reason"]
    return text_table(header, rows)


def _kept(removal: Removal) -> str:
    return f"the end of step {removal.kept}" if removal.kept >= 0 else "the beginning"


def _evaluations(removal: Removal) -> str:
    return ", ".join(f"{p.name} step {p.step}: {percent(p.accuracy)}" for p in removal.evaluations) or "none"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(inner)}" for key, inner in value.items())
    if isinstance(value, list) and len(value) == 2 and not any(isinstance(v, list | dict) for v in value):
        return f"{_value(value[0])} → {_value(value[1])}"
    if isinstance(value, list):
        return " ".join(_value(inner) for inner in value)
    if isinstance(value, float):
        return number(value, digits=4)
    return str(value)
