"""Runs whose processes are ended whatever happens, and the demo's model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_runs import Run

from colocate_grpo import processes
from colocate_grpo.demo.recipe import DemoPaths


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
def demo(demo_model: DemoPaths) -> DemoPaths:
    """The demo's model: a start from which there is something to learn."""
    return demo_model
