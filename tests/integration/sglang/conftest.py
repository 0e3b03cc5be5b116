"""Real SGLang servers on CPU, started once for all tests of a module; kills come last."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_runs import STRANGERS, Pool

from colocate_grpo import processes

sys.path.append(str(Path(__file__).parents[1]))  # test_engine_contract, also where only this folder is collected


@pytest.fixture(scope="session")
def run_tag(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Tag of every process of these tests; none outlives them, however they end."""
    tag = f"test-{os.getpid()}"
    with processes.lifeline(tag, tmp_path_factory.mktemp("guard") / "log"):
        yield tag


@pytest.fixture(scope="module")
def engine_environment(run_tag: str) -> Iterator[None]:
    """What an engine inherits its environment from: the tag of its run, and variables that are not for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(processes.RUN_ID, run_tag)
        for name, value in STRANGERS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, engine_environment: None) -> Iterator[Pool]:
    """Two started engines; nothing of them outlives the module."""
    pool = Pool(tmp_path_factory.mktemp("run"), engines=2)
    pool.run(pool.pool.start())
    yield pool
    pool.run(pool.pool.stop())
    pool.runner.close()
    assert pool.processes() == []
