"""What happened to the run, in order: the engineering log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from colocate_grpo.observe.jsonl import Row
from colocate_grpo.observe.metrics import Removal
from colocate_grpo.report.markdown import duration, moment, number, percent, step_ranges, text_table
from colocate_grpo.report.record import RunRecord, attempts

# Regular work, told as sums.
ROUTINE = ("save", "rotate", "eval")
# Told elsewhere in the report, or in every row.
HIDDEN = ("kind", "time", "attempt", "versions", "hardware", "commit", "command_line")
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
        parts += [_counts(run), _attempts(run), "### Events", _told(run), *_saves(run)]
    else:
        parts.append("No events are recorded.")
    if run.counted.removals:
        parts += ["### What a rollback or a resume took away", _removals(run.counted.removals)]
    return "\n\n".join(parts)


def describe(fields: Row) -> str:
    """The fields of an event as `name value`, short."""
    if fields.get("kind") == "config_change":
        return _cut("; ".join(f"`{key}`: {_json(old)} → {_json(new)}" for key, (old, new) in fields["changes"].items()))
    shown = {key: value for key, value in fields.items() if key not in HIDDEN and value not in (None, "", [], {})}
    text = "; ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in shown.items())
    return _cut(text)


def _counts(run: RunRecord) -> str:
    counts = Counter(str(event.get("kind")) for event in run.events)
    return "Events: " + ", ".join(f"{kind.replace('_', ' ')} {number(n)}" for kind, n in counts.most_common()) + "."


def _attempts(run: RunRecord) -> str:
    """One line an attempt; its time is that between its first and last entry."""
    rows = []
    for attempt, entries in attempts(run).items():
        steps = sorted({entry["step"] for entry in entries if entry["kind"] == "step" and "step" in entry})
        ends = [entry for entry in entries if entry.get("kind") in ("attempt_end", "run_end")]
        outcome = f"{ends[-1].get('outcome', '')} {ends[-1].get('message') or ''}".strip() if ends else "not recorded"
        times = [entry["time"] for entry in entries]
        began, lasted = moment(min(times)), duration(max(times) - min(times))
        rows.append([str(attempt), began, lasted, step_ranges(steps) or "none", outcome])
    header = ["attempt", "began (UTC)", "lasted", "steps recorded", "ended"]
    return f"### Attempts\n\n{text_table(header, rows)}"


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
    saves = run.of_kind("save")
    if saves:
        seconds = [row["perf/save_time"] for row in run.steps if row.get("perf/save_time")]
        mean = f", {duration(sum(seconds) / len(seconds))} each on average" if seconds else ""
        sizes = [event["bytes"] for event in saves if "bytes" in event]
        size = f", the last one {number(sizes[-1] / 2**20)} MiB" if sizes else ""
        steps = sorted({event["step"] for event in saves})
        yield f"Saved after step {step_ranges(steps)} ({len(saves)} saves{mean}{size})."
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(_value(inner) for inner in value)
    if isinstance(value, float):
        return number(value, digits=4)
    return str(value)
