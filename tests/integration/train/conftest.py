"""One torchrun per world size; every test reads the results of the checks that ran inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_models

HERE = Path(__file__).parent
TIMEOUT = 1500


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one small fp32 model of each family, and one in bf16."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "llama", "qwen2"):
        small_models.write(family, root / family)
    small_models.write("qwen3", root / "qwen3_bf16", small_models.torch.bfloat16)
    return root


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Results of the worker by world size; larger worlds come first: the smaller ones load what they saved."""
    shared = tmp_path_factory.mktemp("train")
    cache: dict[int, dict[str, Any]] = {}

    def of(world: int) -> dict[str, Any]:
        for size in (4, 2, 1):
            if size >= world and size not in cache:
                cache[size] = run_worker(size, models, shared)
        return cache[world]

    return of


def run_worker(world: int, models: Path, shared: Path) -> dict[str, Any]:
    log, out = shared / f"world{world}.log", shared / f"world{world}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    command = [sys.executable, "-W", "ignore", *launcher, str(HERE / "worker.py"), str(models), str(shared), str(out)]
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with log.open("w") as stream:
        worker = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        code = worker.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)  # torchrun alone would leave its ranks behind
        code = worker.wait()
    assert code == 0, log.read_text()[-6000:]
    return json.loads(out.read_text())
