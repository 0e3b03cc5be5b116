"""What a checkpoint holds of the trainer: model and optimizer through Megatron's dist_checkpointing.

The format is in the model's own shapes, so it loads under another TP and DP.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import psutil  # noqa: F401 - without it Megatron's writer hangs for ever instead of failing
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async

from colocate_grpo.train.masters import CHECKPOINT_METADATA
from colocate_grpo.train.optimizer import Optimizer


def save_state(directory: Path, model: Any, optimizer: Optimizer) -> None:
    """Write weights, masters, moments and step into `directory` (made if needed); collective, synchronous."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    _use_plain_results_queue()
    state = _sharded_state(model, optimizer, loading=False)
    dist_checkpointing.save(
        state, str(directory), get_default_save_sharded_strategy(), content_metadata=dict(CHECKPOINT_METADATA)
    )


def load_weights(directory: Path, model: Any) -> None:
    """Load the weights alone, into a model without optimizer; collective."""
    model.load_state_dict(_read(directory, "model", model.sharded_state_dict(metadata=_metadata())))


def load_state(directory: Path, model: Any, optimizer: Optimizer) -> None:
    """Load into existing tensors, under this run's TP and DP; collective."""
    state = _sharded_state(model, optimizer, loading=True)
    model.load_state_dict(_read(directory, "model", state["model"]))
    optimizer.load(state["optimizer"], lambda part: _read(directory, "optimizer", part))


def _read(directory: Path, name: str, part: dict[str, Any]) -> dict[str, Any]:
    strategy = get_default_load_sharded_strategy(str(directory))
    return dist_checkpointing.load({name: part}, str(directory), strategy)[name]


def _sharded_state(model: Any, optimizer: Optimizer, loading: bool) -> dict[str, Any]:
    model_state = model.sharded_state_dict(metadata=_metadata())
    return {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state, loading)}


def _metadata() -> dict[str, Any]:
    return {
        **CHECKPOINT_METADATA,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _use_plain_results_queue() -> None:
    """A synchronous save needs no queue of another process.

    Megatron would spawn a manager, which imports the main module again (seconds), hangs where that has no
    guard, and outlives a rank that ends hard, holding its pipes open.
    """
    filesystem_async._results_queue = queue.Queue()
