"""The published figures of Qwen3-4B on 8 x 24 GB, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocate_grpo.config import Config
from colocate_grpo.config_file import load_config
from colocate_grpo.plan.assessment import Plan, make_plan
from colocate_grpo.plan.hardware import GIB
from colocate_grpo.rollout.sglang_options import server_options

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture(scope="module")
def reference() -> Config:
    return load_config(CONFIGS / "qwen3_4b_8x4090.yaml")


@pytest.fixture(scope="module")
def plan(reference: Config) -> Plan:
    return make_plan(reference)


def gib(value: float) -> float:
    return round(value / GIB, 2)


def test_parameters(plan: Plan) -> None:
    assert plan.shape.parameters == 4_022_468_096


def test_trainer_bytes_of_a_card_at_tp4_dp2(plan: Plan) -> None:
    trainer = plan.memory.trainer
    assert (gib(trainer.weights), gib(trainer.gradients), gib(trainer.optimizer)) == (1.87, 3.75, 5.62)


def test_kv_bytes_of_a_token_at_engine_tp2(plan: Plan) -> None:
    assert plan.memory.kv.bytes_per_token == 73_728


def test_checkpoint(plan: Plan) -> None:
    assert plan.disk.values == 4_022_468_096 * (2 + 4 + 4 + 4)
    assert round(plan.disk.values / GIB, 1) == 52.4


def test_longest_sequence_and_not_the_cap_sets_the_activation_peak(reference: Config, plan: Plan) -> None:
    train = reference.train.model_copy(update={"max_tokens_per_microbatch": 1024})
    smaller_cap = make_plan(reference.model_copy(update={"train": train}))
    longer = make_plan(
        reference.model_copy(update={"rollout": reference.rollout.model_copy(update={"max_new_tokens": 16384})})
    )
    activations = plan.memory.table["train"]["activations"]
    assert smaller_cap.memory.table["train"]["activations"] == activations
    assert longer.memory.table["train"]["activations"] > 1.7 * activations
    assert plan.largest_microbatch == 8192 + 1024


def test_rollout_takes_the_published_time_and_bandwidth_alone_about_two_minutes(plan: Plan) -> None:
    """Published: 15 to 18 minutes for 1.15 M tokens."""
    assert plan.time is not None
    assert 15 * 60 <= plan.time.rollout <= 18 * 60
    assert 1.5 * 60 <= plan.time.bandwidth_floor <= 2.5 * 60
    assert plan.time.tokens == pytest.approx(1.15e6, rel=0.05)


def test_whole_run_takes_about_the_published_46_6_hours(reference: Config, plan: Plan) -> None:
    from colocate_grpo.plan.timing import run_hours

    assert plan.time is not None
    assert run_hours(reference, plan.time) == pytest.approx(46.6, rel=0.1)


def test_reference_fits(plan: Plan) -> None:
    assert plan.problems() == []


def test_a_cpu_server_caches_what_it_is_started_with(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "demo_sglang.yaml", [f"run.dir={tmp_path}"])
    options = server_options(config, tmp_path, "cpu", 0, 1, "key")
    assert make_plan(config).memory.kv.tokens == options["max_total_tokens"]


def test_what_a_sleeping_engine_keeps_is_in_the_trainers_columns(plan: Plan) -> None:
    """Of an engine TP2 of Qwen3: NCCL 0.35, FlashInfer 0.5, the process 0.1; the trainer's own workspace 0.25."""
    for phase in ("train", "update", "save"):
        assert gib(plan.memory.table[phase]["workspace"]) == 1.2


def test_graphs_stay_while_the_engine_sleeps(reference: Config) -> None:
    rollout = reference.rollout.model_copy(update={"sglang": {"mem_fraction_static": 0.8}})
    memory = make_plan(reference.model_copy(update={"rollout": rollout})).memory
    assert {gib(memory.table[phase]["cuda_graphs"]) for phase in memory.table} == {0.8}
    assert gib(memory.asleep) == 2.9  # and contexts 0.9, NCCL 0.15 + 0.35, FlashInfer 0.5, two processes 0.2


def test_another_attention_backend_or_no_server_keeps_less(reference: Config) -> None:
    rollout = reference.rollout.model_copy(update={"sglang": {**reference.rollout.sglang, "attention_backend": "fa3"}})
    assert gib(make_plan(reference.model_copy(update={"rollout": rollout})).memory.table["train"]["workspace"]) == 0.7
    embedded = reference.rollout.model_copy(update={"engine": "embedded", "engines": 1, "tp": 1, "slots": 1})
    assert gib(make_plan(reference.model_copy(update={"rollout": embedded})).memory.table["train"]["workspace"]) == 0.25


def test_a_push_takes_three_of_its_largest_tensor(plan: Plan) -> None:
    """The embedding of 151,936 x 2,560 in bf16 goes alone, three times the 256 MiB of a bucket."""
    assert plan.memory.table["push"]["workspace"] - 3 * 151_936 * 2_560 * 2 == pytest.approx(0.95 * GIB, rel=1e-6)
