"""Where the time and the memory went."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colocate_grpo.observe.jsonl import Row
from colocate_grpo.report.markdown import ABSENT, duration, number, percent, table
from colocate_grpo.report.record import RunRecord, attempts

# Parts of a step, one after the other. Grading runs beside the rollout, so that its seconds are not among them.
STEP_PARTS = {
    "rollout": "perf/rollout_time",
    "log-probs": "perf/log_probs_time",
    "training": "perf/actor_train_time",
    "push": "perf/update_weights_time",
    "sleep/wake": "perf/sleep_wake_time",
    "save": "perf/save_time",
}
REWARD = "perf/reward_time"
EVALUATION = "perf/eval_time"
STEP = "perf/step_time"
_MEMORY = re.compile(r"memory/(?P<phase>[^/]+)/(?P<kind>[a-z_]+)_gib")
MEMORY_KINDS = {
    "allocated": "GPU allocated",
    "reserved": "GPU reserved",
    "free": "GPU free, least",
    "host_rss": "host, resident",
}


@dataclass(frozen=True)
class Spent:
    """Seconds of the counted steps and evaluations by phase, and those that no longer count."""

    phases: dict[str, float]
    removed: float
    between_attempts: float

    @property
    def total(self) -> float:
        return sum(self.phases.values())


def parts_of(row: Row) -> dict[str, float]:
    """Seconds of each part of one step, and what no part accounts for as `idle`."""
    parts = {name: float(row.get(metric, 0.0)) for name, metric in STEP_PARTS.items()}
    # The pass for old log-probs happens inside the training step, and is timed there once more.
    parts["training"] = max(0.0, parts["training"] - parts["log-probs"])
    parts["idle"] = max(0.0, float(row.get(STEP, 0.0)) - sum(parts.values()))
    return parts


def evaluation_seconds(run: RunRecord) -> dict[int, float]:
    """Seconds of the counted evaluations by updates before them."""
    counted = {point.time for point in run.counted.evaluations}
    seconds: dict[int, float] = {}
    for row in run.rows:
        if row.get("kind") == "eval" and row.get("time") in counted:
            updates = row.get("updates", row["step"] + 1 if row.get("baseline") is None else 0)
            seconds[updates] = seconds.get(updates, 0.0) + float(row.get(EVALUATION, 0.0))
    return seconds


def spent(run: RunRecord) -> Spent:
    """The run's time by phase."""
    phases = dict.fromkeys((*STEP_PARTS, "evaluation", "idle"), 0.0)
    for row in run.steps:
        for name, seconds in parts_of(row).items():
            phases[name] += seconds
    phases["evaluation"] = sum(evaluation_seconds(run).values())
    recorded = sum(float(row.get(STEP, 0.0)) for row in run.rows if row.get("kind") == "step")
    return Spent(phases, recorded - sum(float(row.get(STEP, 0.0)) for row in run.steps), _between_attempts(run))


def cost_section(run: RunRecord) -> str:
    """Section on time, speed and memory."""
    if not run.steps:
        return "## Where the time went\n\nNo finished step is recorded."
    parts = ["## Where the time went", _time_table(run), *_time_notes(run), "### Speed", _speed_table(run)]
    memory = memory_peaks(run.steps)
    parts += ["### Memory", _memory_table(run, memory) if memory else "No memory figures are recorded."]
    return "\n\n".join(parts)


def memory_peaks(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """GiB by phase and kind: the most of all steps, of free memory the least."""
    peaks: dict[str, dict[str, float]] = {}
    for row in rows:
        for key, value in row.items():
            match = _MEMORY.fullmatch(key)
            if match and isinstance(value, int | float):
                phase, kind = peaks.setdefault(match["phase"], {}), match["kind"]
                extreme = min if kind == "free" else max
                phase[kind] = extreme(phase.get(kind, value), value)
    return peaks


def _between_attempts(run: RunRecord) -> float:
    """Seconds from each attempt's last entry to the first one of the next."""
    ordered = list(attempts(run).values())
    pauses = (after[0]["time"] - before[-1]["time"] for before, after in itertools.pairwise(ordered))
    return sum(max(0.0, pause) for pause in pauses)


def _time_table(run: RunRecord) -> str:
    time = spent(run)
    count = len(run.steps)
    rows = [
        [name, duration(seconds), ABSENT if name == "evaluation" else duration(seconds / count),
         percent(seconds / time.total if time.total else None)]
        for name, seconds in time.phases.items()
        if seconds > 0
    ]  # fmt: skip
    steps = time.total - time.phases["evaluation"]
    rows.append(["**all**", f"**{duration(time.total)}**", f"**{duration(steps / count)}**", percent(1.0)])
    return table(["phase", "total", "a step", "share"], rows)


def _time_notes(run: RunRecord) -> Iterator[str]:
    time = spent(run)
    grading = sum(float(row.get(REWARD, 0.0)) for row in run.steps)
    yield f"Counted are the {len(run.steps)} steps that made the result. `idle` is what no phase accounts for."
    if grading:
        yield (
            f"Grading ran beside the rollout and is inside it: {duration(grading)} of waiting, summed over answers"
            " that waited at the same time."
        )
    if time.removed > 0:
        yield f"Another {duration(time.removed)} went into steps that a rollback or a resume did away with."
    if time.between_attempts > 0:
        yield f"Between attempts passed {duration(time.between_attempts)}."


def _speed_table(run: RunRecord) -> str:
    speeds = {
        "generation": [row["perf/rollout_tokens_per_s"] for row in run.steps if "perf/rollout_tokens_per_s" in row],
        "training": [speed for row in run.steps if (speed := _training_speed(row)) is not None],
    }
    rows = [
        [name, number(sum(values) / len(values)), number(min(values)), number(max(values))]
        for name, values in speeds.items()
        if values
    ]
    if not rows:
        return "No tokens/s are recorded."
    return table(["tokens/s", "mean of the steps", "slowest step", "fastest step"], rows)


def _training_speed(row: Row) -> float | None:
    if "perf/train_tokens_per_s" in row:
        return float(row["perf/train_tokens_per_s"])
    seconds = row.get("perf/actor_train_time", 0.0)
    return row["train/tokens"] / seconds if seconds and "train/tokens" in row else None


def _memory_table(run: RunRecord, peaks: dict[str, dict[str, float]]) -> str:
    known = {kind for phase in peaks.values() for kind in phase}
    # Without a GPU the other figures are the host's once more.
    shown = [kind for kind in MEMORY_KINDS if kind in known and (kind == "host_rss" or _has_gpu(run))]
    rows = [[name, *(number(phase.get(kind)) for kind in shown)] for name, phase in peaks.items()]
    return table(["GiB, rank 0, highest of all steps", *(MEMORY_KINDS[kind] for kind in shown)], rows)


def _has_gpu(run: RunRecord) -> bool:
    """Whether the run trained on one, as far as that is recorded."""
    if run.option("run.device") == "cpu":
        return False
    starts = [event["hardware"] for event in run.of_kind("attempt_start") if "hardware" in event]
    return not starts or bool(starts[-1].get("gpus")) or run.option("run.device") == "cuda"
