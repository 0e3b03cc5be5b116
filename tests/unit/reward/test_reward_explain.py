"""The message for a batch in which every reward is equal."""

from __future__ import annotations

import pytest

from colocate_grpo.reward.explain import count_reasons, explain_equal_rewards
from colocate_grpo.trajectory import Verdict

CORRECT, WRONG, NONE = Verdict(1.0, "correct"), Verdict(0.0, "wrong"), Verdict(0.0, "no_answer")


def test_different_rewards_need_no_explanation() -> None:
    assert explain_equal_rewards([CORRECT, WRONG], ["", ""]) == ""
    assert explain_equal_rewards([], []) == ""


@pytest.mark.parametrize(
    ("responses", "hint"),
    [
        ([r"<think> so \boxed{5}"] * 4, "100 % no_answer; no </think> in any response"),
        ([r"so \boxed{5}"] * 4, "no </think> in any response"),
        (["</think> five"] * 4, r"no \boxed in any response"),
        (["five"] * 4, r"no \boxed in any response"),
        ([r"</think> \boxed{5"] * 4, r"4 of 4 responses have a \boxed, but none after </think>"),
    ],
)
def test_no_answers(responses: list[str], hint: str) -> None:
    text = explain_equal_rewards([NONE] * 4, responses)
    assert text.startswith("all 4 rewards are 0: 100 % no_answer")
    assert hint in text
    assert "\n" not in text


def test_mixed_reasons_are_counted() -> None:
    verdicts = [WRONG, WRONG, WRONG, NONE]
    assert count_reasons(verdicts) == {"wrong": 3, "no_answer": 1}
    text = explain_equal_rewards(verdicts, [""] * 4)
    assert "75 % wrong, 25 % no_answer" in text
    assert "too hard" in text


def test_other_causes() -> None:
    assert "too easy" in explain_equal_rewards([CORRECT] * 3, [""] * 3)
    assert "raise the response length" in explain_equal_rewards([Verdict(0.0, "truncated")] * 3, [""] * 3)
    excluded = explain_equal_rewards([Verdict(None, "error", "KeyError: 'x'")] * 3, [""] * 3)
    assert "all 3 rewards are excluded" in excluded
    assert "KeyError: 'x'" in excluded
