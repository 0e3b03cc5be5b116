"""Bytes on disk: checkpoints, exports and dumps."""

from __future__ import annotations

from dataclasses import dataclass

from colocate_grpo.config import Config
from colocate_grpo.plan.memory import ELEMENT
from colocate_grpo.train.shape import ModelShape

# One token of a trajectory in a jsonl.zst dump: its id, mask and log-prob after compression.
DUMP_BYTES_PER_TOKEN = 12
# torch.distributed.checkpoint wraps every stored piece; measured.
STORED_TENSOR_BYTES = 1950


@dataclass(frozen=True)
class DiskPlan:
    """Bytes in the run directory when it is fullest; `live` is the number of kept checkpoints, one more is written.

    A `checkpoint` is its `values` and what the format adds to them.
    """

    checkpoint: int
    values: int
    live: int
    export: int
    dumps: int

    @property
    def total(self) -> int:
        return self.checkpoint * (self.live + 1) + self.export + self.dumps


def checkpoint_bytes(shape: ModelShape, config: Config) -> int:
    """Size of a checkpoint's files."""
    items = _stored_tensors(shape, config.parallel.tp) * (3 if _rounds(config) else 4)
    return checkpoint_values(shape, config) + items * STORED_TENSOR_BYTES


def checkpoint_values(shape: ModelShape, config: Config) -> int:
    """Bytes of model and optimizer: each value once, whatever the layout; the vocabulary stays padded.

    AdamW stores weights, fp32 masters (of fp32 weights too) and two fp32 moments; stochastic rounding no masters.
    """
    padding = (shape.padded_vocab(config.parallel.tp) - shape.vocab) * shape.hidden * (1 if shape.tied else 2)
    value = 2 + 2 * 2 if _rounds(config) else ELEMENT[config.model.dtype] + 4 + 8
    return (shape.parameters + padding) * value


def _rounds(config: Config) -> bool:
    return config.train.optimizer.kind == "sr_adamw"


def _stored_tensors(shape: ModelShape, tp: int) -> int:
    """Pieces of one state: sharded tensors once a TP rank (the two halves of fc1 apart), the others once."""
    sharded = shape.layers * (5 + shape.qkv_bias) + (1 if shape.tied else 2)
    return sharded * tp + shape.layers * (2 + 2 * shape.qk_norm) + 1


def plan_disk(shape: ModelShape, config: Config, tokens_per_step: float) -> DiskPlan:
    """Bytes of the whole run, where nobody pins a checkpoint by hand."""
    return DiskPlan(
        checkpoint=checkpoint_bytes(shape, config),
        values=checkpoint_values(shape, config),
        live=most_kept(config),
        export=shape.parameters * ELEMENT[config.model.dtype] if config.checkpoint.export_best else 0,
        dumps=int(config.run.steps * tokens_per_step * DUMP_BYTES_PER_TOKEN) if config.run.dump_rollouts else 0,
    )


def most_kept(config: Config) -> int:
    """Checkpoints that the store's rules keep at most, wherever a stop puts an additional save.

    The newest, the best, every so many-th; one from before the guards' window and the one after it, unless the newest
    ones reach as far back. One that waits for its evaluation is the newest.
    """
    keep, window = config.checkpoint, config.guards.step.window
    guarded = (window >= keep.keep_last) + (window > keep.keep_last)
    every = (config.run.steps - 1) // keep.keep_every if keep.keep_every else 0
    best = keep.keep_best if config.eval.every else 0
    return min(keep.keep_last + guarded + every + best, config.run.steps - 1)
