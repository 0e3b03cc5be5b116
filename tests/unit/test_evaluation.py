"""pass@1 and its error by hand, and what the batch metrics count."""

from __future__ import annotations

import math

import pytest

from colocate_grpo.config import Config, EvalSet
from colocate_grpo.data import Prompt, PromptSet
from colocate_grpo.evaluation import Evaluator, eval_metrics
from colocate_grpo.rollout.statistics import has_variance, is_repetitive, rollout_metrics
from colocate_grpo.trajectory import Trajectory, Verdict


def made(group, score, status="completed", length=3, reason="wrong"):
    return Trajectory(
        prompt_id=str(group), group_id=group, sample_index=0, seed=0, token_ids=[1] + [2] * length,
        loss_mask=[0] + [1] * length, rollout_logprobs=[0.0] * (length + 1), weight_versions=[], status=status,
        verdict=None if score is None and status == "failed" else Verdict(score, reason),
    )  # fmt: skip


def test_pass_at_1_is_the_mean_over_problems_and_its_error_is_clustered():
    # Problem means 1, 1/2, 0: mean 1/2; standard deviation 1/2; over sqrt(3).
    samples = [made(0, 1), made(0, 1), made(1, 1), made(1, 0), made(2, 0), made(2, 0)]
    metrics = eval_metrics("aime", samples)
    assert metrics["eval/aime"] == 0.5
    assert metrics["eval/aime/stderr"] == pytest.approx(0.5 / math.sqrt(3))
    assert metrics["eval/aime/problems"] == 3
    assert metrics["eval/aime/samples"] == 2


def test_a_shaped_reward_leaves_pass_at_1_as_it_is():
    samples = [made(0, 1), made(1, 0), made(2, 1)]
    for sample in samples:
        sample.verdict = Verdict(sample.verdict.score - 1.0, "wrong", accuracy=sample.verdict.score)
    samples.append(made(3, None, reason="error"))
    metrics = eval_metrics("x", samples)
    assert metrics["eval/x"] == pytest.approx(2 / 3)
    assert metrics["eval/x/stderr"] == pytest.approx(1 / 3)
    assert metrics["eval/x/reward"] == pytest.approx(-1 / 3)
    assert rollout_metrics(samples)["rollout/raw_reward"] == pytest.approx(-1 / 3)
    assert "eval/x/reward" not in eval_metrics("x", [made(0, 1), made(1, 0)])


def test_what_failed_or_is_excluded_is_no_zero():
    samples = [made(0, 1), made(0, None, "failed"), made(1, None, reason="bad_gold"), made(2, 0, reason="no_answer")]
    metrics = eval_metrics("x", samples)
    assert metrics["eval/x"] == 0.5
    assert metrics["eval/x/failed"] == 1
    assert metrics["eval/x/no_answer_ratio"] == pytest.approx(1 / 3)


def test_one_problem_has_no_error_to_speak_of():
    metrics = eval_metrics("x", [made(0, 1), made(0, 0)])
    assert metrics["eval/x"] == 0.5
    assert "eval/x/stderr" not in metrics
    assert "rollout/raw_reward/stderr" not in rollout_metrics([made(0, 1), made(0, 0)])


def test_the_error_of_a_batch_is_that_of_its_groups():
    # Group means 1, 1/2, 0, and a group that failed as a whole.
    batch = [made(0, 1), made(0, 1), made(1, 1), made(1, 0), made(2, 0), made(2, 0), made(3, None, "failed")]
    assert rollout_metrics(batch)["rollout/raw_reward/stderr"] == pytest.approx(0.5 / math.sqrt(3))


def evaluator(text="1 + 1 = ?", config=None, **spec):
    values = {"model": {"path": "m"}, "data": {"train": "t"}, **(config or {})}
    prompts = PromptSet("eval.jsonl", (Prompt("0", (1, 2), "2", text, ()),), 0, 0, f"hash of {text}")
    return Evaluator(
        Config.model_validate(values), EvalSet(**{"name": "aime", "path": "eval.jsonl", **spec}), prompts, eos_ids=(0,)
    )


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"samples": 2}, "samples"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"max_new_tokens": 7}, "max_new_tokens"),
        ({"text": "1 + 1 = ? Think."}, "data"),
        ({"config": {"reward": {"function": "exact"}}}, "reward"),
    ],
)
def test_a_protocol_is_its_parts(changed, part):
    before, after = evaluator().protocol(), evaluator(**changed).protocol()
    assert before.fingerprint != after.fingerprint
    assert [key for key in before.parts if before.parts[key] != after.parts[key]] == [part]
    described = {"data": "first_prompt"}.get(part)
    assert described is None or before.described[described] != after.described[described]


def test_a_file_that_moved_is_no_other_protocol():
    here, moved = evaluator().protocol(), evaluator(path="elsewhere.jsonl").protocol()
    assert here.fingerprint == moved.fingerprint
    assert (here.described["path"], moved.described["path"]) == ("eval.jsonl", "elsewhere.jsonl")


def test_batch_metrics_by_hand():
    batch = [made(0, 1, length=2), made(0, 0, length=4), made(1, 0, "truncated", 9), made(1, None, "failed", 1)]
    metrics = rollout_metrics(batch)
    assert metrics["rollout/raw_reward"] == pytest.approx(1 / 3)
    assert metrics["rollout/response_len/mean"] == 5
    assert metrics["rollout/response_len/median"] == 4
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/failed_ratio"] == 0.25
    assert metrics["rollout/zero_variance_ratio"] == 0.5
    assert metrics["rollout/reason/wrong"] == 3


def test_variance_is_that_of_the_survivors():
    assert has_variance([made(0, 1), made(0, 0)])
    assert not has_variance([made(0, 1), made(0, None, "failed")])


def test_a_loop_is_repetitive_and_an_argument_is_not():
    assert is_repetitive("and so on, " * 500)
    assert not is_repetitive("".join(f"{i * i * 7919 % 10007} + {i} = ?\n" for i in range(500)))
    assert not is_repetitive("")
