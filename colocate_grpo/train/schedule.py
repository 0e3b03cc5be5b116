"""Learning rate by update, and what an optimizer step came to. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from colocate_grpo.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """Learning rate of the 0-based `update`; the schedule ends after `decay_steps` or `updates` of them."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    length = max(1, (config.decay_steps or updates) - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / length)
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    floor = config.min_lr_ratio if config.schedule != "constant" else 0.0
    return config.lr * (floor + (1.0 - floor) * left[config.schedule])


@dataclass(frozen=True)
class StepOutcome:
    """`grad_norm` is the global norm before clipping; not `applied` when it was not finite."""

    applied: bool
    grad_norm: float
