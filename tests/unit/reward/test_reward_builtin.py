"""Built-in rewards and their composition."""

from __future__ import annotations

import pytest

from colocate_grpo.errors import ConfigError
from colocate_grpo.reward.builtin import as_verdict, load_reward, run_reward, with_answer_scope
from colocate_grpo.reward.task import RewardTask
from colocate_grpo.trajectory import Verdict


def score(function: str, options: dict, task: RewardTask) -> float | None:
    return run_reward(load_reward(function, options), task).score


def test_math_boxed() -> None:
    assert score("math_boxed", {}, RewardTask(r"\boxed{x+1}", "1+x")) == 1.0
    assert score("math_boxed", {}, RewardTask(r"\boxed{x+1}", "x")) == 0.0
    assert score("math_boxed", {"answer_scope": "after_think"}, RewardTask(r"\boxed{5}", "5")) == 0.0


def test_construct() -> None:
    options = {"checker": "reward_data:is_square"}
    assert score("construct", options, RewardTask(r"\boxed{49}", 7)) == 1.0
    assert score("construct", options, RewardTask(r"\boxed{50}", 7)) == 0.0
    assert run_reward(load_reward("construct", options), RewardTask("49", 7)).reason == "no_answer"
    fence = options | {"source": "fence"}
    assert score("construct", fence, RewardTask("a\n```\n1\n```\nb\n```text\n49\n```\n", 7)) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("1,2", 0.1), ("1,2,3", 0.1 + 0.9 / 4), ("1,2,3,4,5,6", 1.0), ("1,2,3,4,5,6,7,8", 1.0), ("1", 0.1), ("1,1", 0.0)],
)
def test_optimize(answer: str, expected: float) -> None:
    options = {"checker": "reward_data:count_items", "baseline": 2, "target": 6}
    assert score("optimize", options, RewardTask(rf"\boxed{{{answer}}}", None)) == pytest.approx(expected)
    row = {"checker": "reward_data:count_items"}
    gold = {"baseline": 2, "target": 6}
    assert score("optimize", row, RewardTask(rf"\boxed{{{answer}}}", gold)) == pytest.approx(expected)


def test_optimize_downward_and_without_target() -> None:
    options = {"checker": "reward_data:count_items", "baseline": 5, "target": 1}
    assert score("optimize", options, RewardTask(r"\boxed{1,2,3}", None)) == pytest.approx(0.1 + 0.9 * 0.5)
    verdict = run_reward(load_reward("optimize", {"checker": "reward_data:count_items"}), RewardTask(r"\boxed{1}", "x"))
    assert (verdict.score, verdict.reason) == (None, "bad_gold")


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0)])
def test_soft_overlong(tokens: int, expected: float) -> None:
    task = RewardTask("", None, response_tokens=tokens, max_tokens=100)
    assert score("soft_overlong", {"cache": 20}, task) == pytest.approx(expected)


def test_weighted_sum() -> None:
    parts = [
        {"function": "math_boxed"},
        {"function": "soft_overlong", "weight": 0.5, "options": {"cache": 20}},
        {"function": "reward_data:half", "weight": 2.0, "options": {"scale": 0.1}},
    ]
    task = RewardTask(r"\boxed{5}", "5", response_tokens=90, max_tokens=100)
    verdict = run_reward(load_reward("weighted", {"parts": parts}), task)
    assert verdict.score == pytest.approx(1.0 - 0.25 + 0.1)
    assert verdict.reason == "correct"


def test_a_part_that_excludes_excludes_the_sum() -> None:
    parts = [{"function": "math_boxed"}, {"function": "reward_data:excluded"}]
    verdict = run_reward(load_reward("weighted", {"parts": parts}), RewardTask(r"\boxed{5}", "5"))
    assert (verdict.score, verdict.reason) == (None, "excluded")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("weighted", {"parts": []}),
        ("soft_overlong", {"cache": 0}),
        ("construct", {}),
        ("construct", {"checker": "reward_data:is_square", "source": "tail"}),
        ("construct", {"checker": "reward_data"}),
    ],
)
def test_wrong_options(function: str, options: dict) -> None:
    with pytest.raises(ConfigError):
        load_reward(function, options)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_finite_number_is_no_score(score: float) -> None:
    for value in (score, Verdict(score, "wrong"), Verdict(1.0, "correct", accuracy=score)):
        verdict = as_verdict(value)
        assert (verdict.score, verdict.reason) == (None, "error")
        assert str(score) in verdict.detail
    task = RewardTask(str(score), "5")
    assert run_reward(load_reward("reward_data:divided_by_zero", {}), task).score is None
    parts = [{"function": "soft_overlong", "options": {"cache": 20}}, {"function": "reward_data:divided_by_zero"}]
    assert run_reward(load_reward("weighted", {"parts": parts}), task).reason == "error"
    objective = load_reward("optimize", {"checker": "reward_data:no_objective", "target": 5})
    assert run_reward(objective, RewardTask(r"\boxed{5}", "5")).reason == "error"


def test_the_accuracy_of_a_sum_is_that_of_the_part_that_judges_the_answer() -> None:
    parts = [{"function": "soft_overlong", "options": {"cache": 20}}, {"function": "math_boxed"}]
    reward = load_reward("weighted", {"parts": parts})
    for answer, accuracy, reason in (("5", 1.0, "correct"), ("6", 0.0, "wrong")):
        task = RewardTask(rf"\boxed{{{answer}}}", "5", response_tokens=100, max_tokens=100)
        verdict = run_reward(reward, task)
        assert (verdict.score, verdict.accuracy, verdict.reason) == (accuracy - 1.0, accuracy, reason)
    outer = load_reward("weighted", {"parts": [{"function": "weighted", "options": {"parts": parts}}]})
    assert run_reward(outer, task).accuracy == 0.0


def test_scores_as_verdicts() -> None:
    assert as_verdict(1) == Verdict(1.0, "correct")
    assert as_verdict(True) == Verdict(1.0, "correct")
    assert as_verdict(0.3) == Verdict(0.3, "wrong")
    assert as_verdict(None) == Verdict(None, "excluded")
    assert as_verdict(Verdict(0.2, "x")) == Verdict(0.2, "x")


def test_the_answer_scope_reaches_every_part_that_reads_a_box() -> None:
    parts = [
        {"function": "math_boxed"},
        {"function": "math_boxed", "options": {"answer_scope": "whole"}},
        {"function": "soft_overlong", "options": {"cache": 20}},
    ]
    options = with_answer_scope("weighted", {"parts": parts}, "after_think")
    assert [part["options"] for part in options["parts"]] == [
        {"answer_scope": "after_think"},
        {"answer_scope": "whole"},
        {"cache": 20},
    ]
    assert with_answer_scope("math_boxed", {}, "whole") == {"answer_scope": "whole"}
    assert with_answer_scope("package:name", {"x": 1}, "whole") == {"x": 1}
