"""Guards on curves recorded from the demo: as it is, with ten times its learning rate, with an entropy bonus, in
batches of 4 prompts (at its learning rate, too high for them, and at a fifth of it), and with an engine that went on in
bfloat16 after a resume.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from colocate_grpo.config import StepGuards
from colocate_grpo.observe.guards import check_step

RECORDED = Path(__file__).parents[2] / "data" / "guards"
RESUMED_AT = 12


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def firings(history: list[dict[str, Any]], resumed_at: int | None = None) -> dict[str, int]:
    """The step at which each guard fired first as the run went on."""
    first: dict[str, int] = {}
    for end in range(1, len(history) + 1):
        for firing in check_step(history[:end], StepGuards(), resumed_at):
            first.setdefault(firing.name, end - 1)
    return first


@pytest.mark.parametrize("resumed_at", [None, 7, 50, 150])
def test_the_healthy_run_is_left_alone_in_all_its_200_steps(resumed_at: int | None) -> None:
    history = recorded("healthy_demo_200_steps")
    assert history[-1]["rollout/raw_reward"] > 0.95
    assert firings(history, resumed_at) == {}


def test_small_noisy_batches_are_left_alone() -> None:
    history = recorded("healthy_4_prompts")
    rewards = [row["rollout/raw_reward"] for row in history]
    assert any(after < 0.5 * before for before, after in itertools.pairwise(rewards)), "single steps do fall"
    assert firings(history) == {}


@pytest.mark.parametrize(
    ("name", "fall"), [("reward_collapse_lr_1e-2", 1), ("reward_collapse_4_prompts", 7), ("entropy_bonus_0.1", 7)]
)
def test_the_collapsed_run_is_caught_a_few_steps_after_its_fall(name: str, fall: int) -> None:
    """`fall`: the first step of no or hardly any reward."""
    history = recorded(name)
    assert all(row["rollout/raw_reward"] < 0.2 for row in history[fall:])
    assert fall <= firings(history)["reward_collapse"] <= fall + 6


def test_the_rising_entropy_is_caught_long_before_its_end() -> None:
    history = recorded("entropy_bonus_0.1")
    fired = firings(history)["entropy_rise"]
    assert history[fired]["train/entropy_loss"] < 0.25 * history[-1]["train/entropy_loss"]


def test_an_engine_that_no_longer_agrees_after_a_resume_is_caught_at_its_first_step() -> None:
    history = recorded("bfloat16_engine_after_a_resume")
    assert firings(history, RESUMED_AT)["logprob_mismatch"] == RESUMED_AT
    assert "logprob_mismatch" not in firings(history[: RESUMED_AT + 1]), "only the resume makes one step enough"
