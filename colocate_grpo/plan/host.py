"""Host RAM by phase, and /dev/shm: what sleeps, what saving and loading gather, the reference of the KL term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from colocate_grpo.config import Config
from colocate_grpo.plan.hardware import GIB, MIB, Assumptions, runs_on_gpu
from colocate_grpo.plan.memory import ELEMENT, TrainerBytes, flat_elements
from colocate_grpo.train.shape import ModelShape

# Masters and two moments of AdamW, in fp32, as the checkpoint gathers them on the host.
STATES = 12
FP32 = 4
# The two moments of the stochastic-rounding optimizer.
ROUNDED_STATES = 4


@dataclass(frozen=True)
class HostPlan:
    """Bytes of host RAM: `phases` are what each adds to the processes, of all ranks together; `shm` is /dev/shm."""

    phases: Mapping[str, int]
    processes: int
    shm: int

    @property
    def fullest(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def total(self) -> int:
        return self.phases[self.fullest] + self.processes + self.shm


def plan_host(shape: ModelShape, config: Config, trainer: TrainerBytes, assumed: Assumptions) -> HostPlan:
    """Host RAM of the whole run on one machine."""
    ranks, workers = config.parallel.world_size, config.rollout.engines * config.rollout.tp
    servers = workers if config.rollout.engine == "sglang" else 0
    resident = ranks * assumed.trainer_rss_gib + servers * assumed.engine_rss_gib + assumed.driver_rss_gib
    nccl_ranks = (ranks if ranks > 1 else 0) + (servers if config.rollout.tp > 1 else 0)
    return HostPlan(
        phases=_phases(shape, config, trainer),
        processes=int(resident * GIB),
        shm=int(nccl_ranks * assumed.nccl_shm_mib * MIB),
    )


def moved_bytes(config: Config, trainer: TrainerBytes) -> int:
    """Bytes of all ranks that go out at a sleep and come back: weights and optimizer; gradients are zeros again."""
    return config.parallel.world_size * (trainer.weights + trainer.optimizer)


def save_bytes(shape: ModelShape, config: Config) -> tuple[int, int]:
    """Most host bytes of a save on the first rank of a DP group, and on each other one.

    AdamW: the first rank holds the gathered states, and one of them twice while each tensor gets memory of its own;
    then the weights for the writers. The others hold their shard of one state. Stochastic rounding: every rank
    gathers both moments; the first copies them, and the weights, for the writers.
    """
    elements, dp, copied = _elements(shape, config), config.parallel.dp, ELEMENT[config.model.dtype]
    if config.train.optimizer.kind == "sr_adamw":
        return elements * (2 * ROUNDED_STATES + copied), elements * _rounded_gather(config)
    return elements * (STATES + FP32), FP32 * elements // dp


def load_bytes(shape: ModelShape, config: Config) -> int:
    """Most host bytes of a load, on every rank: a state of its TP shard, and the two halves of fc1 joined again."""
    joined = shape.layers * 2 * shape.ffn // config.parallel.tp * shape.hidden
    if config.train.optimizer.kind == "sr_adamw":
        gathered = _elements(shape, config) * _rounded_gather(config)
        return max(gathered, ROUNDED_STATES * (_elements(shape, config) + joined))
    return FP32 * (_elements(shape, config) + joined)


def _phases(shape: ModelShape, config: Config, trainer: TrainerBytes) -> dict[str, int]:
    """The weights' backup stays once it is made; a resume loads before that."""
    ranks = config.parallel.world_size
    reference = ranks * trainer.weights if config.algorithm.kl.coef > 0 else 0
    kept = 0 if config.memory.backup_dir else ranks * _pinned(trainer.weights, config)
    asleep = 0 if config.memory.backup_dir else kept + ranks * trainer.optimizer
    first, other = save_bytes(shape, config)
    return {
        "load": ranks * load_bytes(shape, config) + reference,
        "asleep": asleep + reference,
        # While the reference is in place, the trained weights wait on the host too.
        "train": kept + 2 * reference,
        "save": kept + reference + config.parallel.tp * (first + (config.parallel.dp - 1) * other),
    }


def _pinned(size: int, config: Config) -> int:
    """torch rounds a pinned block up to a power of two, and keeps it."""
    return 1 << (size - 1).bit_length() if runs_on_gpu(config) else size


def _rounded_gather(config: Config) -> int:
    """Bytes an element of both gathered moments; gloo needs a copy of one more."""
    return ROUNDED_STATES if runs_on_gpu(config) else ROUNDED_STATES + 2


def _elements(shape: ModelShape, config: Config) -> int:
    return flat_elements(shape, config.parallel.tp, config.parallel.dp)
