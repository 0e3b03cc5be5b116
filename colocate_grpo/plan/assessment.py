"""The whole plan of a configuration: memory, host, disk and time, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.plan.disk import DiskPlan, HostPlan, plan_disk, plan_host
from colocate_grpo.plan.hardware import GIB, RTX_4090, Assumptions, Card
from colocate_grpo.plan.memory import MemoryPlan, plan_memory
from colocate_grpo.plan.model_shape import read_model_config
from colocate_grpo.train.shape import ModelShape, validate_model


@dataclass(frozen=True)
class Plan:
    """Everything that `plan` says of one configuration."""

    config: Config
    shape: ModelShape
    card: Card
    memory: MemoryPlan
    host: HostPlan
    disk: DiskPlan

    @property
    def fits(self) -> bool:
        return not self.memory.problems()


def make_plan(config: Config, assumed: Assumptions | None = None) -> Plan:
    """Plan `config`; ConfigError where it cannot be run at any size of card."""
    hf = read_model_config(config.model.path)
    return plan_shape(validate_model(config, hf), config, assumed or Assumptions())


def plan_shape(shape: ModelShape, config: Config, assumed: Assumptions) -> Plan:
    check_layout(shape, config)
    memory_gib = config.memory.gpu_gib or RTX_4090.memory_gib
    memory = plan_memory(shape, config, int(memory_gib * GIB), assumed)
    tokens = config.rollout.prompts_per_step * config.rollout.group_size * config.rollout.max_new_tokens
    return Plan(
        config, shape, RTX_4090, memory, plan_host(config, memory.trainer, assumed), plan_disk(shape, config, tokens)
    )


def check_layout(shape: ModelShape, config: Config) -> None:
    """Rules of the engine's layout that the configuration alone cannot know."""
    tp, cards = config.rollout.tp, config.parallel.world_size
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        raise ConfigError(
            f"rollout.tp: {tp} does not divide the model's {shape.heads} heads ({shape.kv_heads} KV heads)"
        )
    if config.rollout.engine == "sglang" and config.rollout.engines * tp > cards:
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
        "problems": memory.problems(),
        "card_bytes": memory.budget,
        "phases": {phase: dict(rows) | {"total": memory.total(phase)} for phase, rows in memory.table.items()},
        "kv": {"bytes_per_token": memory.kv.bytes_per_token, "tokens": memory.kv.tokens,
               "full_length": memory.kv.full_length, "sequences": memory.kv.sequences},
        "host": {"backup": plan.host.backup, "processes": plan.host.processes, "shm": plan.host.shm,
                 "total": plan.host.total},
        "disk": {"checkpoint": plan.disk.checkpoint, "live": plan.disk.live, "export": plan.disk.export,
                 "dumps": plan.disk.dumps, "total": plan.disk.total},
    }  # fmt: skip
