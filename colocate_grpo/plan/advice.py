"""The smallest changes that make a configuration fit, each verified by planning again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.plan.assessment import Plan, memory_problems
from colocate_grpo.plan.hardware import Assumptions
from colocate_grpo.plan.model_shape import read_model_config, shipped_names
from colocate_grpo.train.shape import ModelShape

Change = dict[str, Any]
MOST_CHANGES = 3
WANTED = 3


def suggest(plan: Plan) -> list[Change]:
    """Up to three changes (`section.key -> value`), the fewest and the least intrusive first; each of them fits.

    Another model is proposed only where no change of options is enough.
    """
    return _smallest(plan, list(candidates(plan))) or _smallest(plan, list(_smaller_models(plan)))


def _smallest(plan: Plan, steps: list[Change]) -> list[Change]:
    found: list[Change] = []
    for size in range(1, MOST_CHANGES + 1):
        for combination in itertools.combinations(steps, size):
            merged = _merge(combination)
            if merged and not any(f.items() <= merged.items() for f in found) and _fits(plan, merged):
                found.append(merged)
            if len(found) == WANTED:
                return found
        if found:
            return found
    return found


def candidates(plan: Plan) -> Iterator[Change]:
    """Single changes, the least intrusive first: what costs time, then what may cost accuracy."""
    config = plan.config
    if not config.train.recompute:
        yield {"train.recompute": True}
    yield from _smaller_engine(config)
    yield from _layouts(config)
    if config.memory.kv_dtype == "auto" and config.rollout.engine == "sglang":
        yield {"memory.kv_dtype": "fp8_e5m2"}
    if config.train.optimizer.kind == "adamw" and config.model.dtype == "bfloat16":
        yield {"train.optimizer.kind": "sr_adamw"}
    yield from _shorter(config)


def _smaller_engine(config: Config) -> Iterator[Change]:
    if config.rollout.engine == "embedded":
        for slots in (32, 16, 8):
            if slots < config.rollout.slots:
                yield {"rollout.slots": slots}
        return
    fraction = config.rollout.sglang.get("mem_fraction_static")
    for share in (0.85, 0.8, 0.75, 0.7, 0.6, 0.5):
        if fraction is not None and share != fraction:
            yield {"rollout.sglang.mem_fraction_static": share}
    if not config.rollout.sglang.get("disable_cuda_graph"):
        yield {"rollout.sglang.disable_cuda_graph": True}


def _layouts(config: Config) -> Iterator[Change]:
    """Other splits of the same cards: trainer TP against DP, engine TP against number of engines."""
    cards, r = config.parallel.world_size, config.rollout
    for tp in (2, 4, 8):
        if tp > config.parallel.tp and cards % tp == 0:
            yield {"parallel.tp": tp, "parallel.dp": cards // tp}
    workers = r.engines * r.tp
    for tp in (2, 4, 8):
        if r.engine == "sglang" and tp > r.tp and workers % tp == 0:
            yield {"rollout.tp": tp, "rollout.engines": workers // tp}
    if not config.parallel.sequence_parallel and cards > 1:
        yield {"parallel.sequence_parallel": True}


def _shorter(config: Config) -> Iterator[Change]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.train.max_tokens_per_microbatch > longest:
        yield {"train.max_tokens_per_microbatch": longest}
    for shift in (1, 2, 3):
        answer = config.rollout.max_new_tokens >> shift
        if answer >= 256:
            caps = {"train.max_tokens_per_microbatch": min(config.train.max_tokens_per_microbatch, answer)}
            evals = {
                f"eval.sets.{i}.max_new_tokens": answer
                for i, s in enumerate(config.eval.sets)
                if (s.max_new_tokens or 0) > answer
            }
            yield {"rollout.max_new_tokens": answer} | caps | evals


def _smaller_models(plan: Plan) -> Iterator[Change]:
    shapes = {name: ModelShape.from_hf(read_model_config(f"hf:{name}")) for name in shipped_names()}
    smaller = [n for n, s in shapes.items() if s.family == plan.shape.family and s.parameters < plan.shape.parameters]
    for name in sorted(smaller, key=lambda n: -shapes[n].parameters):
        owner = "Qwen/" if name.startswith("Qwen") else ""
        yield {"model.path": f"hf:{owner}{name}"}


def _merge(changes: tuple[Change, ...]) -> Change | None:
    """All changes as one; None where two of them set the same key."""
    merged: Change = {}
    for change in changes:
        if merged.keys() & change.keys():
            return None
        merged |= change
    return merged


def _fits(plan: Plan, change: Change) -> bool:
    try:
        return not memory_problems(apply_change(plan.config, change), Assumptions(), plan.card_bytes)
    except (ConfigError, ValidationError):  # a combination that the rules forbid is no advice
        return False


def apply_change(config: Config, change: Change) -> Config:
    """The configuration with `section.key -> value` set."""
    values = config.model_dump(mode="json")
    for key, value in change.items():
        target: Any = values
        *path, last = key.split(".")
        for part in path:
            target = target[int(part)] if isinstance(target, list) else target[part]
        target[last] = value
    return Config.model_validate(values)


def as_overrides(change: Change) -> str:
    """The change as it is typed on the command line."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items()
    )
