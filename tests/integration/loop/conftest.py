"""A small demo model, and one uninterrupted run of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_runs import Runner

from colocate_grpo import processes
from colocate_grpo.demo.recipe import make_demo
from colocate_grpo.demo.warmup import WarmUp


@pytest.fixture(scope="session")
def runner(tmp_path_factory) -> Iterator[Runner]:
    root = tmp_path_factory.mktemp("runs")
    demo = make_demo(root / "demo_model", seed=0, plan=WarmUp(clean_steps=60, careless_steps=20, threads=1))
    made = Runner(demo, root)
    yield made
    left = [p for name in root.iterdir() for p in processes.find(processes.run_id(name))]
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert left == [], "a run left processes behind"


@pytest.fixture(scope="session")
def reference(runner) -> Path:
    """The uninterrupted run."""
    return runner.finish("reference")
