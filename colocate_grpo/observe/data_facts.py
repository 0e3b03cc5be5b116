"""What the prompts of a run are, recorded with every attempt."""

from __future__ import annotations

from collections.abc import Iterable

from colocate_grpo.data import PromptSet


def data_facts(train: PromptSet, evaluation: Iterable[PromptSet]) -> dict[str, float | str]:
    """Values for an "attempt" row of metrics.jsonl; the rows are those that `data.limit` leaves."""
    trained = {prompt.question for prompt in train.rows}
    shared = {prompt.question for prompts in evaluation for prompt in prompts.rows} & trained
    return {
        "data/rows": len(train.rows) + train.dropped,
        "data/unique": len(trained),
        "data/duplicates": train.duplicates,
        "data/dropped": train.dropped,
        "data/usable": len(train.rows),
        "data/eval_overlap": len(shared),
        "data/fingerprint": train.fingerprint,
    }
