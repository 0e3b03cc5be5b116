"""The whole plan of a configuration: memory, host, disk and time, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.plan.disk import DiskPlan, plan_disk
from colocate_grpo.plan.hardware import GIB, RTX_4090, Assumptions, Card, runs_on_gpu
from colocate_grpo.plan.host import HostPlan, plan_host
from colocate_grpo.plan.memory import MemoryPlan, micro_batch, plan_memory
from colocate_grpo.plan.model_shape import read_model_config
from colocate_grpo.plan.timing import TimePlan, plan_time
from colocate_grpo.train.shape import ModelShape, validate_model


@dataclass(frozen=True)
class Plan:
    """Everything that `plan` says of one configuration; `card_bytes` is a card of this machine, where it has one."""

    config: Config
    shape: ModelShape
    card: Card
    memory: MemoryPlan
    host: HostPlan
    disk: DiskPlan
    time: TimePlan | None
    card_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return not self.problems()

    @property
    def largest_microbatch(self) -> int:
        """Tokens of the micro-batch that sets the activation peak."""
        return micro_batch(self.config).tokens

    def problems(self) -> list[str]:
        """One sentence for each thing that does not fit."""
        return self.memory.problems()


def make_plan(config: Config, assumed: Assumptions | None = None, card_bytes: int | None = None) -> Plan:
    """Plan `config`; ConfigError where it cannot be run at any size of card.

    `card_bytes` is what a card here has, which `memory.gpu_gib` goes before.
    """
    shape = validate_model(config, read_model_config(config.model.path, config.model.revision))
    return plan_shape(shape, config, assumed or Assumptions(), card_bytes)


def plan_shape(shape: ModelShape, config: Config, assumed: Assumptions, card_bytes: int | None = None) -> Plan:
    """Plan a model whose shape is known."""
    check_layout(shape, config)
    card = RTX_4090
    memory = plan_memory(shape, config, _budget(config, card_bytes), assumed)
    time = plan_time(shape, config, memory.kv, card, assumed)
    batch = config.rollout.prompts_per_step * config.rollout.group_size
    tokens = time.tokens if time else batch * config.rollout.max_new_tokens
    disk, host = plan_disk(shape, config, tokens), plan_host(shape, config, memory.trainer, assumed)
    return Plan(config, shape, card, memory, host, disk, time, card_bytes)


def memory_problems(config: Config, assumed: Assumptions, card_bytes: int | None) -> list[str]:
    """What of the memory does not fit: the quick part of a plan, without the time model."""
    hf = read_model_config(config.model.path, config.model.revision)
    return memory_plan(config, hf, assumed, card_bytes).problems()


def memory_plan(config: Config, hf: dict[str, Any], assumed: Assumptions, card_bytes: int | None = None) -> MemoryPlan:
    """The memory of a card for a model's config.json."""
    shape = validate_model(config, hf)
    check_layout(shape, config)
    return plan_memory(shape, config, _budget(config, card_bytes), assumed)


def _budget(config: Config, card_bytes: int | None) -> int:
    """Bytes of a card; on the CPU a rank's share of the machine's memory."""
    if not runs_on_gpu(config):
        return psutil.virtual_memory().total // config.parallel.world_size
    given = config.memory.gpu_gib
    return int(given * GIB) if given else card_bytes or int(RTX_4090.memory_gib * GIB)


def check_layout(shape: ModelShape, config: Config) -> None:
    """Rules of the engine's layout that the configuration alone cannot know."""
    tp, cards = config.rollout.tp, config.parallel.world_size
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        raise ConfigError(
            f"rollout.tp: {tp} does not divide the model's {shape.heads} heads ({shape.kv_heads} KV heads)"
        )
    if runs_on_gpu(config) and config.rollout.engine == "sglang" and config.rollout.engines * tp > cards:
        raise ConfigError(
            f"rollout.engines: {config.rollout.engines} engines of TP {tp} need {config.rollout.engines * tp} cards, "
            f"the trainer has {cards} (parallel.tp x parallel.dp)"
        )


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values of a plan, bytes as integers."""
    memory = plan.memory
    return {
        "model": {"family": plan.shape.family, "parameters": plan.shape.parameters},
        "fits": plan.fits,
        "problems": plan.problems(),
        "card_bytes": memory.budget,
        "phases": {phase: dict(rows) | {"total": memory.total(phase)} for phase, rows in memory.table.items()},
        "kv": {"bytes_per_token": memory.kv.bytes_per_token, "tokens": memory.kv.tokens,
               "full_length": memory.kv.full_length, "sequences": memory.kv.sequences},
        "host": {"phases": dict(plan.host.phases), "fullest": plan.host.fullest,
                 "processes": plan.host.processes, "shm": plan.host.shm, "total": plan.host.total},
        "disk": {"checkpoint": plan.disk.checkpoint, "live": plan.disk.live, "export": plan.disk.export,
                 "dumps": plan.disk.dumps, "total": plan.disk.total},
        "seconds": _times(plan.time) if plan.time else None,
    }  # fmt: skip


def _times(time: TimePlan) -> dict[str, float]:
    names = ("rollout", "bandwidth_floor", "tokens", "training", "push", "sleep_wake", "save", "evaluation", "step")
    return {name: getattr(time, name) for name in names} | {"iterations": time.outcome.iterations}
