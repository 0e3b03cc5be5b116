"""Host RAM of the reference run by hand, and what changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocate_grpo.config_file import load_config
from colocate_grpo.plan.assessment import Plan, as_json, make_plan
from colocate_grpo.plan.hardware import GIB
from colocate_grpo.plan.host import moved_bytes

REFERENCE = Path(__file__).resolve().parents[3] / "configs" / "qwen3_4b_8x4090.yaml"


def plan(*overrides: str) -> Plan:
    return make_plan(load_config(REFERENCE, list(overrides)))


def phases(*overrides: str) -> dict[str, float]:
    return {phase: round(size / GIB, 1) for phase, size in plan(*overrides).host.phases.items()}


def test_phases_of_the_reference_run_by_hand() -> None:
    """1.007e9 values a TP rank; 8 ranks in 4 DP groups of 2; 2 GiB of pinned weights a rank (1.87 rounded up)."""
    values = plan().memory.trainer.weights // 2
    joined = 36 * 2 * 9728 // 4 * 2560
    save = 4 * values * ((12 + 4) + 4 // 2) + 8 * 2 * GIB
    assert phases() == {
        "load": round(8 * 4 * (values + joined) / GIB, 1),
        "asleep": round(8 * (5.62 + 2), 1),
        "train": 16.0,
        "save": round(save / GIB, 1),
    }
    host = plan().host
    assert (host.fullest, host.total) == ("save", host.phases["save"] + host.processes + host.shm)
    assert as_json(plan())["host"]["fullest"] == "save"
    readme = (REFERENCE.parents[1] / "README.md").read_text()
    assert f"{host.total / GIB:.0f} GiB of host memory at its fullest" in readme


def test_weights_sleep_on_the_host_beside_their_masters() -> None:
    trainer = plan().memory.trainer
    assert moved_bytes(plan().config, trainer) == 8 * (trainer.weights + trainer.optimizer)


def test_a_backup_directory_takes_what_sleeps_but_not_the_save() -> None:
    on_disk = phases("memory.backup_dir=/mnt/fast")
    assert (on_disk["asleep"], on_disk["train"]) == (0, 0)
    assert on_disk["save"] == pytest.approx(phases()["save"] - 16, abs=0.15)
    assert on_disk["load"] == phases()["load"]


def test_a_reference_takes_host_memory_and_time() -> None:
    with_kl, without = plan("algorithm.kl.coef=0.001"), plan()
    weights = 8 * without.memory.trainer.weights
    added = {name: with_kl.host.phases[name] - size for name, size in without.host.phases.items()}
    assert added == {"load": weights, "asleep": weights, "train": 2 * weights, "save": weights}
    assert with_kl.time is not None
    assert without.time is not None
    # One forward pass beside the three that recompute, forward and backward of two come to.
    assert 1.2 < with_kl.time.training / without.time.training < 1.35


def test_stochastic_rounding_takes_less_of_the_host() -> None:
    rounded, full = phases("train.optimizer.kind=sr_adamw"), phases()
    assert rounded["save"] < full["save"]
    assert rounded["asleep"] == round(8 * (1.87 + 2), 1)
