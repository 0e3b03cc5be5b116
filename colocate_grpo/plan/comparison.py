"""Alternatives to a configuration side by side: what each would take in memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.plan.advice import Change, apply_change, as_overrides
from colocate_grpo.plan.assessment import Plan, plan_shape
from colocate_grpo.plan.hardware import Assumptions
from colocate_grpo.plan.memory import no_cuda_graphs


@dataclass(frozen=True)
class Alternative:
    """A change and its plan; `refused` says why there is none."""

    name: str
    plan: Plan | None
    refused: str = ""


def compare(plan: Plan, assumed: Assumptions) -> list[Alternative]:
    """The configuration itself first, then every alternative, the fastest that fits first."""
    found = [_alternative(plan, change, assumed) for change in alternatives(plan.config)]
    return [Alternative("as configured", plan), *sorted(found, key=_rank)]


def alternatives(config: Config) -> Iterator[Change]:
    """One decision changed at a time: trainer layout, engine layout, micro-batch, KV type, optimizer, graphs, tail."""
    cards, workers = config.parallel.world_size, config.rollout.engines * config.rollout.tp
    for tp in (1, 2, 4, 8):
        if cards % tp == 0 and tp != config.parallel.tp:
            layout = {"parallel.tp": tp, "parallel.dp": cards // tp}
            yield layout
            if config.train.optimizer.kind == "adamw" and config.model.dtype == "bfloat16":
                yield layout | {"train.optimizer.kind": "sr_adamw"}
    if config.train.optimizer.kind == "adamw" and config.model.dtype == "bfloat16":
        yield {"train.optimizer.kind": "sr_adamw"}
    yield {"train.max_tokens_per_microbatch": 2 * config.train.max_tokens_per_microbatch}
    if config.rollout.engine == "sglang":
        yield from _engine_alternatives(config, workers)


def _engine_alternatives(config: Config, workers: int) -> Iterator[Change]:
    for tp in (1, 2, 4):
        if workers % tp == 0 and tp != config.rollout.tp:
            yield {"rollout.tp": tp, "rollout.engines": workers // tp}
    if config.memory.kv_dtype == "auto":
        yield {"memory.kv_dtype": "fp8_e5m2"}
    if no_cuda_graphs(config):
        batch = -(-config.rollout.prompts_per_step * config.rollout.group_size // config.rollout.engines)
        yield {"rollout.sglang.disable_cuda_graph": False, "rollout.sglang.cuda_graph_max_bs_decode": batch}
    else:
        yield {"rollout.sglang.disable_cuda_graph": True}
    if config.rollout.over_sampling == 1.0:
        yield {"rollout.over_sampling": 1.25}


def _alternative(plan: Plan, change: Change, assumed: Assumptions) -> Alternative:
    try:
        changed = apply_change(plan.config, change)
        return Alternative(as_overrides(change), plan_shape(plan.shape, changed, assumed, plan.card_bytes))
    except (ConfigError, ValidationError) as error:  # an alternative that the rules forbid is a row that says so
        return Alternative(as_overrides(change), None, str(error).splitlines()[0])


def _rank(alternative: Alternative) -> tuple[int, float]:
    plan = alternative.plan
    if plan is None:
        return 2, 0.0
    return (0 if plan.fits else 1), (plan.time.step if plan.time else 0.0)
