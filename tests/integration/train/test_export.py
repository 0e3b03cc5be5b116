"""Export: a trained checkpoint as a Hugging Face directory, bit for bit what the trainer had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_models as small
import torch
from transformers import AutoModelForCausalLM

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config_file import dump_config
from colocate_grpo.errors import DataError
from colocate_grpo.memory.saver import make_saver
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer
from colocate_grpo.weights.export import export_hf
from colocate_grpo.weights.hf import tensor_checksum


def trained_run(model_dir: Path, run_dir: Path, dtype: str) -> tuple[dict[str, str], list[torch.Tensor]]:
    """A run directory with one checkpoint; the trainer's checksums and log-probs at the save."""
    config = small.make_config(
        model_dir,
        model={"dtype": dtype},
        run={"dir": str(run_dir)},
        train={"optimizer": {"lr": 1e-2}},
    )
    parallel = Parallel.initialise(config)
    try:
        trainer = Trainer.build(config, parallel, make_saver(config, parallel.device), model_dir)
        trainer.step(small.make_batch(1), 0)
        run_dir.mkdir()
        dump_config(config, run_dir / "config.yaml")
        store = CheckpointStore(run_dir, config.checkpoint)
        path = store.begin(0)
        trainer.save(path / "megatron")
        store.publish(path, {"step": 0})
        return trainer.checksums(), [torch.from_numpy(p) for p in trainer.logprobs(small.make_batch(2))]
    finally:
        parallel.shutdown()


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_bf16", "bfloat16"), ("llama", "float32")])
def test_transformers_loads_what_was_trained(models: Path, tmp_path: Path, family: str, dtype: str) -> None:
    checksums, logprobs = trained_run(models / family, tmp_path / "run", dtype)
    out = export_hf(tmp_path / "run", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == f"torch.{dtype}"
    state = model.state_dict()
    assert {name: tensor_checksum(state[name]) for name in checksums} == checksums
    assert model.config.vocab_size == small.VOCAB
    if dtype == "float32":
        with torch.no_grad():
            for found, trajectory in zip(logprobs, small.make_batch(2), strict=True):
                torch.testing.assert_close(small.plain_logprobs(model, trajectory)[0], found, atol=5e-6, rtol=0)


def test_one_checkpoint_can_be_named(models: Path, tmp_path: Path) -> None:
    checksums, _ = trained_run(models / "llama", tmp_path / "run", "float32")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    out = export_hf(checkpoint, tmp_path / "out")
    weights = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert weights.keys() == checksums.keys()


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a checkpoint nor a run directory"):
        export_hf(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
