"""Faults of Megatron-core 0.16.1 and of its surroundings that bit once, where no parity test would name them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import small_models as small
import torch

from colocate_grpo.memory.saver import make_saver
from colocate_grpo.nvidia import has_nvidia_card
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer


@pytest.fixture
def trainer(models: Path):
    config = small.make_config(models / "qwen3", train={"optimizer": {"lr": 1e-3, "weight_decay": 0.5}})
    parallel = Parallel.initialise(config)
    yield Trainer.build(config, parallel, make_saver(config, parallel.device), models / "qwen3")
    parallel.shutdown()


@pytest.mark.skipif(has_nvidia_card(), reason="with a driver the import works")
def test_megatron_imports_beside_a_package_that_cannot_load_its_driver(tmp_path: Path) -> None:
    """`flash_mla` (of sglang) raises OSError where Megatron expects ImportError."""
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcuda.so.1')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {{}}import megatron.core.transformer.attention"
    guard = "import colocate_grpo.train; "
    codes = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", script.format(first)], capture_output=True).returncode
        for first in ("", guard)
    ]
    assert codes == [1, 0]


def test_a_save_leaves_no_process_behind(trainer: Trainer, tmp_path: Path) -> None:
    """Megatron's results manager would stay, import the main module again, and hold the rank's pipes open."""
    trainer.step(small.make_batch(1), 0)
    before = psutil.Process().children(recursive=True)
    trainer.save(tmp_path / "saved")
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_weight_decay_is_not_on_norms(trainer: Trainer) -> None:
    """Without gradients decay alone moves weights: matrices shrink by 1 - lr * decay, norms stay."""
    before = {n: p.detach().clone() for n, p in trainer.policy.named_parameters()}
    trainer.ddp.zero_grad_buffer()
    trainer.optimizer.step(lr=0.1)
    for name, param in trainer.policy.named_parameters():
        expected = before[name] if param.dim() == 1 else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(param.detach(), expected)


def test_moments_exist_from_the_start_and_a_load_fills_them(trainer: Trainer, tmp_path: Path) -> None:
    """The saver must see them before the first step, and a load must not put others in their place."""
    addresses = [t.data_ptr() for t in trainer.optimizer_tensors()]
    assert sum(t.numel() for t in trainer.optimizer_tensors()) >= 2 * trainer.shape.parameters
    trainer.step(small.make_batch(1), 0)
    trainer.save(tmp_path / "saved")
    trainer.load(tmp_path / "saved")
    assert [t.data_ptr() for t in trainer.optimizer_tensors()] == addresses


def test_no_rotary_buffer_hides_in_the_model(trainer: Trainer) -> None:
    """A buffer inside a saver region without backup would wake as garbage."""
    assert list(trainer.policy.named_buffers()) == []
    weights = {t.untyped_storage().data_ptr() for t in trainer.weight_buffers()}
    assert {p.untyped_storage().data_ptr() for p in trainer.policy.parameters()} <= weights


@pytest.mark.parametrize("kind", ["adamw", "sr_adamw"])
def test_tiny_updates_of_bf16_weights_are_not_lost(models: Path, kind: str) -> None:
    """lr 1e-6, 20 steps: along the update of the fp32 masters the bf16 weights of stochastic rounding move just as far.
    Those of the master optimizer are rounded to the nearest and mostly stay, while its masters move."""
    settings = {"optimizer": {"kind": kind, "lr": 1e-6}}
    config = small.make_config(models / "qwen3_bf16", model={"dtype": "bfloat16"}, train=settings)
    parallel = Parallel.initialise(config)
    try:
        trainer = Trainer.build(config, parallel, make_saver(config, parallel.device), models / "qwen3_bf16")
        start = torch.cat([p.detach().double().flatten() for p in trainer.policy.parameters()])
        for _ in range(20):
            for param in trainer.policy.parameters():
                param.main_grad.fill_(1e-3)  # Adam's update is then lr in every weight, whatever the gradient's size
            trainer.optimizer.step(1e-6)
        moved = torch.cat([p.detach().double().flatten() for p in trainer.policy.parameters()]) - start
    finally:
        parallel.shutdown()
    if kind == "sr_adamw":
        assert -moved.mean().item() == pytest.approx(20e-6, rel=0.05)
    else:
        assert (moved == 0).double().mean() > 0.8
