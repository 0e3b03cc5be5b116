"""An old driver, a missing card and a busy card are told apart."""

from __future__ import annotations

import pytest
import torch
from machine import Nvml, context

from colocate_grpo.doctor import allreduce, driver, gpu_processes, gpus

EIGHT = {"tp": 4, "dp": 2}


def levels(nvml: Nvml) -> tuple[str, str, str]:
    machine = context(nvml, parallel=EIGHT)
    return gpus.check(machine).level, driver.check(machine).level, gpu_processes.check(machine).level


def test_a_good_machine() -> None:
    assert levels(Nvml(cards=8)) == ("ok", "ok", "ok")


def test_old_driver_names_both_versions() -> None:
    assert levels(Nvml(cards=8, driver="570.124.06")) == ("ok", "fail", "ok")
    finding = driver.check(context(Nvml(cards=8, driver="570.124.06")))
    assert "570.124.06" in finding.what
    assert "580" in finding.what
    assert str(torch.version.cuda) in finding.what


def test_missing_card() -> None:
    assert levels(Nvml(cards=7)) == ("fail", "ok", "ok")
    assert "7 cards, 8 needed" in gpus.check(context(Nvml(cards=7), parallel=EIGHT)).what


def test_busy_card_names_the_process() -> None:
    assert levels(Nvml(cards=8, busy={3: 4242})) == ("ok", "ok", "fail")
    assert "card 3: process 4242" in gpu_processes.check(context(Nvml(cards=8, busy={3: 4242}))).what


def test_no_driver_at_all() -> None:
    assert levels(Nvml()) == ("fail", "fail", "ok")


def test_smaller_card_than_planned() -> None:
    small = context(Nvml(cards=1, memory=15.99), memory={"gpu_gib": 24})
    assert gpus.check(small).level == "fail"
    assert "memory.gpu_gib=16.0" in gpus.check(small).how_to_mend


def test_cpu_run_needs_no_card() -> None:
    machine = context(Nvml(), run={"device": "cpu"})
    assert (gpus.check(machine).level, driver.check(machine).level) == ("ok", "ok")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Cards whose sums are wrong while P2P is on; the calls that were made."""
    calls: list[dict[str, str]] = []

    def run(backend: str, ranks: int, environment: dict[str, str]) -> str | None:
        calls.append(environment)
        return None if environment.get("NCCL_P2P_DISABLE") == "1" else "rank 0: 3 of 1000 sums are wrong"

    monkeypatch.setattr(allreduce, "run_workers", run)
    return calls


def test_wrong_sums_over_p2p_switch_it_off_for_the_run(workers: list[dict[str, str]]) -> None:
    finding = allreduce.check(context(Nvml(cards=2)))
    assert finding.level == "warn"
    assert finding.environment == {"NCCL_P2P_DISABLE": "1"}
    assert workers == [{}, {"NCCL_P2P_DISABLE": "1"}]


def test_wrong_sums_without_p2p_fail(workers: list[dict[str, str]]) -> None:
    assert allreduce.check(context(Nvml(cards=2), {"NCCL_P2P_DISABLE": "1"})).level == "fail"


def test_real_all_reduce_on_the_cpu_is_right_and_a_wrong_backend_is_told() -> None:
    assert allreduce.run_workers("gloo", 2, {}) is None
    assert "backend" in str(allreduce.run_workers("nonsense_backend", 1, {})).lower()
