"""Planned bytes against what Megatron allocates, autograd keeps and a checkpoint takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import activations_worker
import host_worker
import pytest

from colocate_grpo.config import Config
from colocate_grpo.plan.activations import MicroBatch, activation_peak
from colocate_grpo.plan.disk import checkpoint_bytes
from colocate_grpo.plan.host import load_bytes, save_bytes
from colocate_grpo.plan.memory import trainer_bytes
from colocate_grpo.plan.model_shape import read_model_config
from colocate_grpo.train.shape import ModelShape

HERE = Path(__file__).parent
SIZES, LAYOUTS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B"), ("1 1", "2 4", "4 2")
CASES = [f"{name} {layout} adamw" for name in SIZES for layout in LAYOUTS]
CASES += ["Qwen/Qwen3-8B 4 2 sr_adamw", "Qwen/Qwen2.5-1.5B-Instruct 2 2 adamw", "Llama-3.2-1B-Instruct 2 1 fp32"]
CHECKPOINT_TOLERANCE = 0.02
# What the allocator keeps of messages and small tensors, whatever the size of the model.
RETAINED_BYTES = 48 * 2**20


def run(arguments: list[str], log: Path, processes: int = 1) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-W", "ignore", *(launcher if processes > 1 else []), *arguments]
    with log.open("w") as stream:
        done = subprocess.run(
            command, stdout=stream, stderr=stream, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    assert done.returncode == 0, log.read_text()[-4000:]


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    directory = tmp_path_factory.mktemp("allocations")
    out = directory / "out.json"
    run([str(HERE / "allocations_worker.py"), str(out), *CASES], directory / "log")
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    cache: dict[int, dict[str, Any]] = {}

    def of(tp: int) -> dict[str, Any]:
        if tp not in cache:
            directory = tmp_path_factory.mktemp(f"tp{tp}")
            out = directory / "out.json"
            run([str(HERE / "activations_worker.py"), str(out), str(directory), str(tp)], directory / "log", tp)
            cache[tp] = json.loads(out.read_text())
        return cache[tp]

    return of


@pytest.mark.parametrize("case", CASES)
def test_trainer_bytes_equal_megatrons(case: str, allocated: dict[str, dict[str, int]]) -> None:
    name, tp, dp, kind = case.split(" ")
    config = Config.model_validate(
        {
            "model": {"path": "unused", "dtype": "float32" if kind == "fp32" else "bfloat16"},
            "data": {"train": "unused"},
            "parallel": {"tp": int(tp), "dp": int(dp)},
            "train": {"optimizer": {"kind": "sr_adamw" if kind == "sr_adamw" else "adamw"}},
        }
    )
    planned = trainer_bytes(ModelShape.from_hf(read_model_config(f"hf:{name}")), config)
    real = allocated[case]
    assert (planned.weights, planned.gradients) == (real["weights"], real["gradients"])
    assert planned.optimizer == pytest.approx(real["optimizer"], rel=0.01)


@pytest.mark.parametrize("tp", [1, 2])
def test_activation_peak_equals_the_trackers(tp: int, measured: Callable[[int], dict[str, Any]]) -> None:
    for case, peak in measured(tp)["activations"].items():
        name, dtype, recompute, tokens = case.split(" ")
        batch = MicroBatch(
            tokens=int(tokens), tp=tp, sequence_parallel=True, element=2 if dtype == "bfloat16" else 4,
            chunk=activations_worker.CHUNK,
            recompute=recompute == "True", kernels="composite",
        )  # fmt: skip
        shape = ModelShape.from_hf(activations_worker.MODELS[name])
        assert activation_peak(shape, batch) == pytest.approx(peak, rel=0.05), case


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoint_size_equals_the_directorys(tp: int, measured: Callable[[int], dict[str, Any]]) -> None:
    for case, size in measured(tp)["checkpoints"].items():
        name, dtype, kind = case.split(" ")
        config = activations_worker.config_of(tp, dtype, True, kind)
        planned = checkpoint_bytes(ModelShape.from_hf(activations_worker.MODELS[name]), config)
        assert planned == pytest.approx(size, rel=CHECKPOINT_TOLERANCE), case


def test_host_memory_of_saving_and_loading_equals_the_kernels_peaks(tmp_path: Path) -> None:
    run([str(HERE / "host_worker.py"), str(tmp_path)], tmp_path / "log", processes=2)
    first, other = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    shape = ModelShape.from_hf(host_worker.HF)
    for kind in host_worker.KINDS:
        config = host_worker.config(2, kind)
        expected = pytest.approx(save_bytes(shape, config), rel=0.03, abs=RETAINED_BYTES)
        assert (first[kind]["save"], other[kind]["save"]) == expected, kind
        loaded = max(first[kind]["load"], other[kind]["load"])
        assert loaded == pytest.approx(load_bytes(shape, config), rel=0.2, abs=RETAINED_BYTES), kind
