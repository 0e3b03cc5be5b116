"""Every shipped configuration loads, names real SGLang options, and is planned without a download."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from colocate_grpo.config_file import load_config
from colocate_grpo.memory.ledger import CLASSES as LEDGER_CLASSES
from colocate_grpo.memory.ledger import Phase
from colocate_grpo.plan.assessment import make_plan
from colocate_grpo.plan.comparison import compare
from colocate_grpo.plan.hardware import Assumptions
from colocate_grpo.plan.memory import CLASSES, EXTRA_CLASSES, PHASES
from colocate_grpo.rollout.sglang_options import check_options

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_loads_and_fits(path: Path) -> None:
    config = load_config(path)
    check_options(config.rollout.sglang)
    assert make_plan(config).problems() == []


def test_there_is_one_for_each_number_of_cards() -> None:
    cards = {load_config(p).parallel.world_size for p in FILES if load_config(p).run.device == "cuda"}
    assert cards == {1, 2, 4, 8}


def test_classes_are_those_of_the_ledger() -> None:
    assert set(CLASSES) - set(EXTRA_CLASSES) == set(LEDGER_CLASSES)
    assert set(PHASES) - {"update"} <= set(get_args(Phase))


def test_alternatives_are_ranked_and_cover_the_decisions() -> None:
    plan = make_plan(load_config(CONFIGS / "qwen3_4b_8x4090.yaml"))
    rows = compare(plan, Assumptions())
    times = {row.name: row.plan.time for row in rows if row.plan and row.plan.fits}
    own = times["as configured"]
    graphs = next(t for name, t in times.items() if "disable_cuda_graph=false" in name)
    single = next(t for name, t in times.items() if name.startswith("rollout.tp=1"))
    data_parallel = next(t for name, t in times.items() if name.startswith("parallel.tp=2") and "sr_adamw" in name)
    assert own is not None
    assert graphs is not None
    assert single is not None
    assert data_parallel is not None
    assert graphs.rollout < single.rollout < own.rollout
    assert data_parallel.training < own.training
    assert [row.plan.time.step for row in rows[1:] if row.plan and row.plan.fits] == sorted(
        row.plan.time.step for row in rows[1:] if row.plan and row.plan.fits
    )
