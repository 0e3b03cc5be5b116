"""The labelled pairs: agreement, and no false positive."""

from __future__ import annotations

from typing import Any

import pytest
from reward_data import rows

from colocate_grpo.reward.grade import grade, grade_response
from colocate_grpo.trajectory import Verdict


def verdict(row: dict[str, Any]) -> Verdict:
    if "pred" in row:
        return grade(row["pred"], row["gold"])
    return grade_response(row["response"], row["gold"], answer_scope="after_think")


def wrong_rows(data: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Texts of the false negatives and the false positives."""
    graded = [(row, verdict(row).score == 1.0) for row in data]
    shown = [(f"{str(row.get('pred', row.get('response')))[:80]!r} {row['gold']!r}", row, good) for row, good in graded]
    return (
        [text for text, row, good in shown if row["expected"] and not good],
        [text for text, row, good in shown if not row["expected"] and good],
    )


def test_cases() -> None:
    data = rows("grading/cases.jsonl")
    negatives, positives = wrong_rows(data)
    assert positives == []
    assert len(negatives) <= 0.01 * len(data), negatives


def test_variants() -> None:
    """Many more forms of the same kinds."""
    negatives, positives = wrong_rows(rows("grading/variants.jsonl"))
    assert positives == []
    assert negatives == []


# Rows of arguable.jsonl where this project chose otherwise, or does not follow the mathematics; see POLICY.md.
OTHERWISE = {
    r"\int_0^1 2x\,dx",  # needs sympy: only in a worker
    "1.000,50",
    "ⅷ",
    r"###Response \boxed{42}",
    "<think>\nsome work\n</think>\n\n\\boxed{1} and \\boxed{2}",
    "<think>\nsome work\n</think>\n\nx=\\boxed{3}, y=\\boxed{4}",
    "<think>\nsome work\n</think>\n\n\\boxed{k = 45} \\quad \\text{and} \\quad \\boxed{n = 2}",
}


def test_arguable_rows_are_graded_as_the_policy_says() -> None:
    data = [row for row in rows("grading/arguable.jsonl") if row.get("pred") != "E"]
    for row in data:
        text = row.get("pred", row.get("response"))
        expected = 0 if text in OTHERWISE else row["expected"]
        assert (verdict(row).score == 1.0) == bool(expected), (text, row["gold"])


def test_letters_that_are_choices_and_letters_that_are_not() -> None:
    assert grade("e", "E").score == 1.0
    assert grade("E", "e").score == 0.0


@pytest.mark.parametrize("row", rows("grading/cases.jsonl"), ids=lambda row: row["kind"])
def test_a_verdict_has_a_score_and_a_known_reason(row: dict[str, Any]) -> None:
    result = verdict(row)
    assert result.reason in {"correct", "wrong", "no_answer", "unparsable", "too_long", "bad_gold"}
    assert result.score == {"correct": 1.0, "bad_gold": None}.get(result.reason, 0.0)


@pytest.mark.parametrize(
    ("answer", "gold", "reason"),
    [
        ("5", "5", "correct"),
        ("6", "5", "wrong"),
        (None, "5", "no_answer"),
        ("  ", "5", "no_answer"),
        (r"\frac\frac", "5", "unparsable"),
        ("5" * 200_001, "5", "too_long"),
        ("5", "", "bad_gold"),
        ("5", "$$", "bad_gold"),
        ("5", r"\boxed{}", "bad_gold"),
        ("5", r"\frac{1}{2", "bad_gold"),
        ("5", None, "bad_gold"),
        ("5", True, "bad_gold"),
        ("5", float("nan"), "bad_gold"),
        ("5", float("inf"), "bad_gold"),
        ("5", ["5"], "bad_gold"),
        ("", "", "bad_gold"),
    ],
)
def test_reasons(answer: str | None, gold: Any, reason: str) -> None:
    assert grade(answer, gold).reason == reason


def test_a_broken_gold_is_never_a_score() -> None:
    for gold in ("", "  ", None, "{", "}", "$", r"\boxed{", r"\left(\frac{1}{2"):
        assert grade(str(gold), gold).score is None, gold


def test_too_long_responses_are_not_read() -> None:
    text = r"<think></think>\boxed{5}"
    assert grade_response(text + " " * 100, "5", answer_scope="whole", max_chars=50).reason == "too_long"
    assert grade_response(text, "5", answer_scope="whole", max_chars=50).reason == "correct"
    assert grade_response("{" * 10_000_000, "5", answer_scope="whole").reason == "too_long"
