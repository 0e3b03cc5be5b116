"""A Hugging Face directory from a checkpoint: safetensors shards, configuration and tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.config_file import load_config
from colocate_grpo.errors import DataError, writable_directory
from colocate_grpo.hub import resolve_model
from colocate_grpo.weights.hf import buckets

SHARD_BYTES = 4 * 2**30
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
OWN_SHARD = re.compile(r"model-\d{5}\.safetensors")
INDEX = "model.safetensors.index.json"


def export_hf(source: Path, out: Path) -> Path:
    """Write `out`, which `AutoModelForCausalLM.from_pretrained` loads, from a run's newest checkpoint or from one.

    Runs in this process alone, on the CPU, whatever TP and DP saved the checkpoint. Raises DataError where there
    is no complete checkpoint. Returns `out`.
    """
    checkpoint, run_dir = find_checkpoint(Path(source))
    config = load_config(run_dir / "config.yaml")
    model_dir = resolve_model(config.model)
    return write_hf(checkpoint_tensors(config, model_dir, checkpoint / "megatron"), model_dir, Path(out))


def find_checkpoint(source: Path) -> tuple[Path, Path]:
    """(checkpoint, run directory) of a run directory or of one of its checkpoints; DataError where there is none."""
    if (source / "megatron").is_dir():
        return source, source.resolve().parent.parent
    config_file = source / "config.yaml"
    newest = CheckpointStore(source, load_config(config_file).checkpoint).newest() if config_file.is_file() else None
    if newest is None:
        raise DataError(f"{source}: neither a checkpoint nor a run directory with a complete checkpoint")
    return newest.path, source


def checkpoint_tensors(config: Config, model_dir: Path, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of a saved trainer state, read into a model of one process without optimizer."""
    from colocate_grpo.checkpoint.state import load_weights
    from colocate_grpo.train.model import build_policy
    from colocate_grpo.train.parallel import Parallel
    from colocate_grpo.train.shape import read_hf_config, validate_model
    from colocate_grpo.weights.hf import hf_tensors

    alone = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"tp": 1, "dp": 1}),
            "run": config.run.model_copy(update={"device": "cpu"}),
        }
    )
    parallel = Parallel.initialise(alone)
    try:
        shape = validate_model(alone, read_hf_config(model_dir))
        policy = build_policy(shape, alone, parallel)
        load_weights(directory, policy)
        yield from hf_tensors(dict(policy.named_parameters()), shape, parallel.tp_group)
    finally:
        parallel.shutdown()


def write_hf(tensors: Iterator[tuple[str, Tensor]], model_dir: Path, out: Path) -> Path:
    """Shards of at most 4 GiB with an index, beside the original configuration and tokenizer files.

    Raises DataError where `out` cannot be written or holds another model: the one that is trained, for example.
    """
    others = [file.name for file in out.glob("*.safetensors") if not OWN_SHARD.fullmatch(file.name)]
    if others:
        raise DataError(f"{out}: holds another model already ({others[0]}); name another directory")
    writable_directory(out)
    for pattern in MODEL_FILES:
        for file in model_dir.glob(pattern):
            if file.name != INDEX:
                shutil.copy2(file, out / file.name)
    names: dict[str, str] = {}
    size, dtype = 0, torch.float32
    for number, shard in enumerate(buckets(tensors, SHARD_BYTES), start=1):
        file_name = f"model-{number:05d}.safetensors"
        save_file({name: t.detach().cpu().contiguous() for name, t in shard}, out / file_name, {"format": "pt"})
        names |= dict.fromkeys((name for name, _ in shard), file_name)
        size += sum(t.nbytes for _, t in shard)
        dtype = shard[0][1].dtype
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}, indent=1))
    _record_dtype(out / "config.json", dtype)
    return out


def _record_dtype(path: Path, dtype: torch.dtype) -> None:
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)
    path.write_text(json.dumps(settings | {"dtype": str(dtype).removeprefix("torch.")}, indent=2))
