"""Which data the run really saw, and what the answers were judged to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from colocate_grpo.report.headline import mean_of
from colocate_grpo.report.markdown import number, percent, step_ranges, table, text_table
from colocate_grpo.report.record import RunRecord

FACTS = {
    "data/rows": "rows of the training file (after `data.limit`)",
    "data/unique": "unique prompts",
    "data/duplicates": "duplicate rows",
    "data/dropped": "prompts dropped as too long",
    "data/eval_overlap": "evaluation prompts among the training prompts",
    "data/fingerprint": "fingerprint of the prompts as rendered",
}
REASON = "rollout/reason/"


def data_section(run: RunRecord) -> str:
    """The section on data honesty."""
    parts = ["## Data", text_table(["", ""], _facts(run))]
    if run.steps:
        parts += ["### Verdicts on the training answers", _verdicts(run), *_failures(run)]
    return "\n\n".join(parts)


def recorded_facts(run: RunRecord) -> dict[str, Any]:
    """What the newest attempt wrote down about its data."""
    known = [row for row in run.rows if row.get("kind") == "attempt" and "data/rows" in row]
    return {key: value for key, value in known[-1].items() if key.startswith("data/")} if known else {}


def epochs_seen(run: RunRecord, prompts: int | None) -> str | None:
    """Epochs by the data cursor of the last counted step."""
    if not run.steps or "data/epoch" not in run.steps[-1]:
        return None
    epoch, index = run.steps[-1]["data/epoch"], run.steps[-1].get("data/next_index")
    if prompts and index is not None:
        return number(epoch + index / prompts)
    return f"{number(epoch)} whole ones, then {number(index)} prompts" if index is not None else number(epoch)


def verdict_counts(run: RunRecord) -> Counter[str]:
    """Training answers by the reason of their verdict."""
    counts: Counter[str] = Counter()
    for row in run.steps:
        for key, value in row.items():
            if key.startswith(REASON):
                counts[key.removeprefix(REASON)] += round(value)
    return counts


def _facts(run: RunRecord) -> Iterator[list[str]]:
    facts = recorded_facts(run)
    yield ["training file", f"`{run.option('data.train', 'not recorded')}`"]
    for key, label in FACTS.items():
        yield [label, _plain(facts[key]) if key in facts else "not recorded"]
    yield ["epochs seen (data cursor)", epochs_seen(run, facts.get("data/usable")) or "not recorded"]
    trained = sum(verdict_counts(run).values())
    yield ["graded answers of the counted steps", number(trained)]
    dropped = sum(row.get("rollout/groups_dropped", 0.0) for row in run.steps)
    yield ["groups dropped by dynamic sampling", number(dropped)]


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"`{value}`"
    return number(float(value), digits=6)


def _verdicts(run: RunRecord) -> str:
    counts = verdict_counts(run)
    total = sum(counts.values())
    if not total:
        return "No verdicts are recorded."
    rows = [[f"`{reason}`", number(count), percent(count / total)] for reason, count in counts.most_common()]
    return table(["reason", "answers", "share"], rows)


def _failures(run: RunRecord) -> Iterator[str]:
    ratios = [row.get("rollout/failed_ratio", 0.0) for row in run.steps]
    hit = [row["step"] for row, ratio in zip(run.steps, ratios, strict=True) if ratio > 0]
    if hit:
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        yield (
            f"The infrastructure failed {percent(mean_of(run.steps, 'rollout/failed_ratio'))} of the answers, in"
            f" {len(hit)} of {len(run.steps)} steps (worst: {percent(ratios[worst])} in step"
            f" {run.steps[worst]['step']}). They were left out of their groups and count as no answer."
        )
    else:
        yield "The infrastructure failed none of the training answers."
    lost = sum(point.values.get("failed", 0.0) for point in run.evaluations)
    if lost:
        yield f"In evaluations it failed {number(lost)} answers, which were left out of their problems."
    skipped = [row["step"] for row in run.steps if row.get("train/skipped")]
    if skipped:
        yield f"An update was left out in step {step_ranges(skipped)}: the batch was spoilt or the step not finite."
    zero = mean_of(run.steps, "rollout/zero_variance_ratio")
    if zero is not None:
        yield f"On average {percent(zero)} of the groups had equal rewards and therefore no gradient."
