"""Runs whose processes are ended whatever happens, and a small demo model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_runs import Run

from colocate_grpo import processes
from colocate_grpo.demo.recipe import DemoPaths, make_demo
from colocate_grpo.demo.warmup import WarmUp


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for driver in run.drivers:
        if driver.poll() is None:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
    processes.end(processes.run_id(run.dir), 0)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """The demo's model, hardly trained: enough to generate and to learn from."""
    return make_demo(tmp_path_factory.mktemp("demo"), seed=0, plan=WarmUp(clean_steps=20, careless_steps=5))
