"""Ten configurations that no card of 24 GB can hold: refused, each with a change that, applied, passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocate_grpo.config_file import load_config
from colocate_grpo.plan.advice import apply_change, as_overrides, suggest
from colocate_grpo.plan.assessment import make_plan
from colocate_grpo.plan.command import run_plan
from colocate_grpo.plan.hardware import GIB

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
REFERENCE, FOUR, TWO, ONE = "qwen3_4b_8x4090", "qwen3_1.7b_4x24g", "qwen3_1.7b_2x24g", "qwen3_0.6b_1x24g"
IMPOSSIBLE = {
    "pure data parallel": (REFERENCE, ["parallel.tp=1", "parallel.dp=8"]),
    "14B as it is": (REFERENCE, ["model.path=hf:Qwen/Qwen3-14B"]),
    "no recompute at 16k": (REFERENCE, ["train.recompute=false", "rollout.max_new_tokens=16384"]),
    "8B engine on one card": (REFERENCE, ["model.path=hf:Qwen/Qwen3-8B", "rollout.tp=1", "rollout.engines=8"]),
    "engine takes the whole card": (REFERENCE, ["rollout.sglang.mem_fraction_static=0.97"]),
    "4B on two cards": (TWO, ["model.path=hf:Qwen/Qwen3-4B"]),
    "4B on four cards, data parallel": (FOUR, ["model.path=hf:Qwen/Qwen3-4B", "parallel.tp=1", "parallel.dp=4"]),
    "1.7B with fp32 masters on one card": (ONE, ["model.path=hf:Qwen/Qwen3-1.7B"]),
    "4B in fp32 on four cards": (FOUR, ["model.path=hf:Qwen/Qwen3-4B", "model.dtype=float32"]),
    "no room for one sequence": (ONE, ["rollout.sglang.mem_fraction_static=0.06"]),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_refused_with_a_change_that_passes(name: str) -> None:
    file, overrides = IMPOSSIBLE[name]
    path = CONFIGS / f"{file}.yaml"
    plan = make_plan(load_config(path, overrides))
    assert plan.problems()
    advice = suggest(plan)
    assert advice
    for change in advice:
        typed = as_overrides(change).split(" ")
        assert make_plan(load_config(path, [*overrides, *typed])).problems() == []


def test_smallest_change_comes_first() -> None:
    plan = make_plan(load_config(CONFIGS / f"{REFERENCE}.yaml", ["rollout.sglang.mem_fraction_static=0.97"]))
    assert all(len(change) == 1 for change in suggest(plan))


def test_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    path = CONFIGS / f"{REFERENCE}.yaml"
    assert run_plan(load_config(path), json_out=True, compare=False) == 0
    assert run_plan(load_config(path, ["parallel.tp=1", "parallel.dp=8"]), json_out=False, compare=False) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "fits with" in printed


def test_a_card_of_this_machine_is_what_has_to_hold_it_and_what_is_advised_fits_it() -> None:
    config = load_config(CONFIGS / f"{TWO}.yaml")
    config = config.model_copy(update={"memory": config.memory.model_copy(update={"gpu_gib": None})})
    assert make_plan(config).problems() == []
    small = make_plan(config, card_bytes=12 * GIB)
    assert small.problems()
    for change in suggest(small):
        assert make_plan(apply_change(config, change), card_bytes=12 * GIB).problems() == []
