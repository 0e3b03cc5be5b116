"""An old driver, a missing card and a busy card are told apart."""

from __future__ import annotations

import pytest
import torch
from machine import GIB, Nvml, context

from colocate_grpo.doctor import allreduce, driver, gpu_processes, gpus
from colocate_grpo.plan.assessment import Plan

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
    assert "card 3: process 4242" in gpu_processes.check(context(Nvml(cards=8, busy={3: 4242}), parallel=EIGHT)).what


def test_no_driver_at_all() -> None:
    assert levels(Nvml()) == ("fail", "fail", "ok")


def test_smaller_card_than_planned() -> None:
    small = context(Nvml(cards=1, memory=15.99), memory={"gpu_gib": 24})
    assert gpus.check(small).level == "fail"
    assert "memory.gpu_gib=16.0" in gpus.check(small).how_to_mend


def test_a_lost_card_is_named_and_hides_no_other() -> None:
    nvml = Nvml(cards=8, lost=[3])
    assert levels(nvml) == ("fail", "ok", "ok")
    assert gpus.check(context(nvml, parallel=EIGHT)).what == "card 3: GPU is lost"
    assert gpus.check(context(nvml, parallel={"dp": 2})).level == "warn"
    assert levels(Nvml(cards=8, lost=[3], busy={5: 7})) == ("fail", "ok", "fail")


def test_a_driver_that_lists_no_processes_or_tells_no_version_has_cards_all_the_same() -> None:
    assert levels(Nvml(cards=8, lists=False)) == ("ok", "ok", "ok")
    assert "does not list processes" in gpu_processes.check(context(Nvml(cards=8, lists=False), parallel=EIGHT)).what
    assert levels(Nvml(cards=8, driver="N/A")) == ("ok", "warn", "ok")


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("ok", "ok", 2)),
        ("6,7", ("ok", "fail", 2)),
        ("4,5,6,7", ("ok", "ok", 2)),
        ("0", ("fail", "ok", 1)),
        ("0,-1,1", ("fail", "ok", 1)),
        ("", ("fail", "ok", 0)),
        ("GPU-8f3a,GPU-91c2", ("fail", "ok", 2)),
        ("0,1,", ("fail", "ok", 2)),
    ],
)
def test_only_the_cards_that_the_run_uses_are_looked_at(
    visible: str | None, found: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of eight cards, of which the last is busy: levels, and ranks of the all-reduce (0: on the CPU instead)."""
    ranks: list[int] = []
    monkeypatch.setattr(
        allreduce, "run_workers", lambda backend, count, _: ranks.append(count if backend == "nccl" else 0)
    )
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    machine = context(Nvml(cards=8, busy={7: 4242}), environment, parallel={"dp": 2})
    allreduce.check(machine)
    assert (gpus.check(machine).level, gpu_processes.check(machine).level, *(ranks or [1])) == found


def test_names_of_cards_are_a_finding_that_asks_for_numbers() -> None:
    finding = gpus.check(context(Nvml(cards=8), {"CUDA_VISIBLE_DEVICES": "GPU-8f3a"}))
    assert "SGLang reads numbers only" in finding.what
    assert "CUDA_VISIBLE_DEVICES=0,1" in finding.how_to_mend


def test_a_smaller_card_is_planned_for_unless_another_size_is_given() -> None:
    """The smallest of the two cards that are used, not of all three."""
    nvml = Nvml(cards=3, memory=[23.99, 15.99, 7.99])
    plan = context(nvml, parallel={"dp": 2}).plan
    assert isinstance(plan, Plan)
    assert round(plan.memory.budget / GIB, 2) == 15.99
    given = context(nvml, parallel={"dp": 2}, memory={"gpu_gib": 24}).plan
    assert isinstance(given, Plan)
    assert given.memory.budget == 24 * GIB


def test_cpu_run_needs_no_card() -> None:
    machine = context(Nvml(), run={"device": "cpu"})
    assert (gpus.check(machine).level, driver.check(machine).level) == ("ok", "ok")
    beside_busy_cards = context(Nvml(cards=1, busy={0: 4242}), run={"device": "cpu"})
    assert gpu_processes.check(beside_busy_cards).level == "ok"


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
    finding = allreduce.check(context(Nvml(cards=2), parallel={"dp": 2}))
    assert finding.level == "warn"
    assert finding.environment == {"NCCL_P2P_DISABLE": "1"}
    assert workers == [{}, {"NCCL_P2P_DISABLE": "1"}]


def test_wrong_sums_without_p2p_fail(workers: list[dict[str, str]]) -> None:
    assert allreduce.check(context(Nvml(cards=2), {"NCCL_P2P_DISABLE": "1"}, parallel={"dp": 2})).level == "fail"


def test_real_all_reduce_on_the_cpu_is_right_and_a_wrong_backend_is_told() -> None:
    assert allreduce.run_workers("gloo", 2, {}) is None
    assert "backend" in str(allreduce.run_workers("nonsense_backend", 1, {})).lower()
