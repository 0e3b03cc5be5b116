"""Counts of the prompts that an attempt records."""

from __future__ import annotations

from colocate_grpo.data import Prompt, PromptSet
from colocate_grpo.observe.data_facts import data_facts


def _set(questions: list[str], duplicates: int = 0, dropped: int = 0) -> PromptSet:
    rows = tuple(Prompt(str(i), (1,), "1", q, ({"role": "user", "content": q},)) for i, q in enumerate(questions))
    return PromptSet("file.jsonl", rows, duplicates, dropped, "abc")


def test_rows_duplicates_and_overlap_are_counted() -> None:
    train = _set(["a", "b", "b  ", "c"], duplicates=1, dropped=2)
    facts = data_facts(train, [_set(["x", "a"]), _set(["a", "c", "y"])])
    assert facts == {
        "data/rows": 6,
        "data/unique": 3,
        "data/duplicates": 1,
        "data/dropped": 2,
        "data/usable": 4,
        "data/eval_overlap": 2,
        "data/fingerprint": "abc",
    }
