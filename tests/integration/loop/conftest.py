"""Short runs on the demo's model, and one uninterrupted run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_runs import Runner

from colocate_grpo import processes


@pytest.fixture(scope="session")
def runner(tmp_path_factory, demo_model) -> Iterator[Runner]:
    root = tmp_path_factory.mktemp("runs")
    made = Runner(demo_model, root)
    yield made
    left = [p for name in root.iterdir() for p in processes.find(processes.run_id(name))]
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert left == [], "a run left processes behind"


@pytest.fixture(scope="session")
def reference(runner) -> Path:
    """The uninterrupted run."""
    return runner.finish("reference")
