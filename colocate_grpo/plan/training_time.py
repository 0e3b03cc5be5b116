"""Seconds of one training step, as a model: arithmetic, TP traffic, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from colocate_grpo.config import Config
from colocate_grpo.plan.hardware import Assumptions, Card
from colocate_grpo.plan.memory import ELEMENT, trainer_bytes
from colocate_grpo.plan.model_shape import forward_flops
from colocate_grpo.train.shape import ModelShape

# Gathers and scatters of hidden states a layer: forward 4, backward 6 (the inputs are gathered again).
COLLECTIVES_FORWARD, COLLECTIVES_BACKWARD = 4, 6


def training_seconds(
    shape: ModelShape, config: Config, lengths: Sequence[int], card: Card, assumed: Assumptions
) -> float:
    """One pass over trajectories of `lengths` tokens, every `train.updates_per_rollout` included."""
    tokens = sum(lengths)
    attended = sum(n * n / 2 for n in lengths) / max(1, tokens)
    passes = 2 + _forwards(config)
    flops = passes * forward_flops(shape, tokens, attended)
    cards = config.parallel.world_size
    arithmetic = flops / (cards * card.bf16_tflops * 1e12 * assumed.gemm_efficiency)
    traffic = _tp_seconds(shape, config, tokens, assumed)
    updates = config.train.updates_per_rollout * _update_seconds(shape, config, card, assumed)
    return arithmetic + traffic + updates + _reference_seconds(shape, config, card, assumed)


def host_speed(config: Config, card: Card, assumed: Assumptions) -> float:
    """Bytes a second between all cards and the host, whose memory they share."""
    return min(card.pcie_gb_s * config.parallel.world_size, assumed.pcie_host_gb_s) * 1e9


def _forwards(config: Config) -> int:
    """Forward passes over every token: to train, to recompute, and for old and reference log-probs."""
    old = config.train.updates_per_rollout > 1 and not config.rollout.partial.enabled
    return 1 + config.train.recompute + old + (config.algorithm.kl.coef > 0)


def _reference_seconds(shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> float:
    """The trained weights go out, the reference comes in, and the trained ones come back."""
    if config.algorithm.kl.coef == 0:
        return 0.0
    moved = 3 * config.parallel.world_size * trainer_bytes(shape, config).weights
    return moved / host_speed(config, card, assumed)


def _tp_seconds(shape: ModelShape, config: Config, tokens: int, assumed: Assumptions) -> float:
    tp = config.parallel.tp
    if tp == 1:
        return 0.0
    operations = shape.layers * (COLLECTIVES_FORWARD * _forwards(config) + COLLECTIVES_BACKWARD)
    bytes_ = tokens / config.parallel.dp * shape.hidden * ELEMENT[config.model.dtype] * (tp - 1) / tp
    microbatches = tokens / config.parallel.dp / config.train.max_tokens_per_microbatch
    latency = operations * microbatches * assumed.allreduce_latency_us / 1e6
    return latency + operations * bytes_ / (assumed.allreduce_gb_s * 1e9)


def _update_seconds(shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> float:
    """Reduce gradients over DP, update the shard once through memory, gather the weights."""
    trainer, dp = trainer_bytes(shape, config), config.parallel.dp
    moved = (trainer.gradients + trainer.weights) * (dp - 1) / dp
    memory = (2 * trainer.optimizer + trainer.gradients) / (card.bandwidth_gb_s * 1e9 * assumed.bandwidth_efficiency)
    return moved / (assumed.allreduce_gb_s * 1e9) + memory
