"""Time of a step, as a model: rollout, training, push, sleep and wake, save, evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from colocate_grpo.config import Config, EvalSet
from colocate_grpo.plan.disk import checkpoint_bytes
from colocate_grpo.plan.hardware import Assumptions, Card, runs_on_gpu
from colocate_grpo.plan.host import moved_bytes
from colocate_grpo.plan.lengths import LengthModel
from colocate_grpo.plan.memory import (
    ELEMENT,
    KvCapacity,
    TrainerBytes,
    engine_element,
    kv_element,
    no_cuda_graphs,
    trainer_bytes,
)
from colocate_grpo.plan.model_shape import engine_parameters, forward_flops, kv_bytes_per_token
from colocate_grpo.plan.rollout import Engine, Job, Latency, Outcome, Scheduler
from colocate_grpo.plan.training_time import host_speed, training_seconds
from colocate_grpo.train.shape import ModelShape

# Rows of an evaluation file that is not here: AIME has 30 problems.
ASSUMED_EVAL_ROWS = 30
PROMPT_TOKENS_ASSUMED = 200
# SGLang's defaults on a card of 24 GB, engine TP below 4.
DEFAULT_CHUNK = 4096
DEFAULT_GRAPH_BATCH = 48


@dataclass(frozen=True)
class DecodeParts:
    """Seconds of one decode step by cause; what the card does overlaps with launching it."""

    weights: float
    kv: float
    launch: float
    all_reduce: float
    scheduler: float

    @property
    def total(self) -> float:
        return max(self.weights + self.kv, self.launch) + self.all_reduce + self.scheduler

    @property
    def bandwidth_only(self) -> float:
        return self.weights + self.kv


@dataclass(frozen=True)
class TimePlan:
    """Seconds. `rollout` is the slowest engine's; `bandwidth_floor` is the same rollout with memory bandwidth alone."""

    rollout: float
    bandwidth_floor: float
    tokens: int
    outcome: Outcome
    parts: DecodeParts
    training: float
    push: float
    sleep_wake: float
    save: float
    evaluation: float

    @property
    def step(self) -> float:
        """A step without save and evaluation."""
        return self.rollout + self.training + self.push + self.sleep_wake


def plan_time(shape: ModelShape, config: Config, kv: KvCapacity, card: Card, assumed: Assumptions) -> TimePlan | None:
    """The time model of SGLang on cards; None for other engines, on the CPU, and where one sequence does not fit."""
    if config.rollout.engine != "sglang" or kv.sequences < 1 or not runs_on_gpu(config):
        return None
    decode = decode_model(shape, config, card, assumed)
    latency = Latency(_prefill_model(shape, config, card, assumed), lambda n, tokens: decode(n, tokens).total)
    floor = Latency(lambda tokens: 0.0, lambda n, tokens: decode(n, tokens).bandwidth_only)
    jobs = rollout_jobs(config)
    outcomes = simulate(jobs, config, kv, latency)
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    tokens = sum(outcome.generated for outcome in outcomes)
    trainer = trainer_bytes(shape, config)
    requests = max(1, len(jobs) // config.rollout.engines)
    trained = jobs[: config.rollout.prompts_per_step * config.rollout.group_size]
    return TimePlan(
        rollout=slowest.seconds,
        bandwidth_floor=max(o.seconds for o in simulate(jobs, config, kv, floor)),
        tokens=tokens,
        outcome=slowest,
        parts=decode(requests, slowest.peak_kv / 2),
        training=training_seconds(shape, config, [job.prompt + job.output for job in trained], card, assumed),
        push=_push_seconds(shape, config, assumed),
        sleep_wake=_sleep_wake_seconds(config, trainer, card, assumed),
        save=checkpoint_bytes(shape, config) / (assumed.disk_gb_s * 1e9),
        evaluation=sum(_evaluation_seconds(s, config, kv, latency) for s in config.eval.sets),
    )


def decode_model(shape: ModelShape, config: Config, card: Card, assumed: Assumptions):
    """A function (requests, kv_tokens) -> DecodeParts."""
    tp = config.rollout.tp
    bandwidth = card.bandwidth_gb_s * 1e9 * assumed.bandwidth_efficiency
    weights = engine_parameters(shape, tp) * engine_element(config) / bandwidth
    kv_second = kv_bytes_per_token(shape, tp, kv_element(config)) / bandwidth
    graph_batch = int(config.rollout.sglang.get("cuda_graph_max_bs_decode", DEFAULT_GRAPH_BATCH))
    eager = shape.layers * assumed.eager_launch_ms_per_layer / 1e3

    def parts(requests: int, kv_tokens: float) -> DecodeParts:
        graphs = not no_cuda_graphs(config) and requests <= graph_batch
        launch = assumed.graph_launch_ms / 1e3 if graphs else eager
        row = requests * shape.hidden * engine_element(config)
        reduce_ = _all_reduces(shape) * all_reduce_seconds(row, tp, assumed)
        return DecodeParts(weights, kv_tokens * kv_second, launch, reduce_, assumed.scheduler_ms / 1e3)

    return parts


def _all_reduces(shape: ModelShape) -> int:
    """Two a layer (attention, MLP) and one of the embedding."""
    return 2 * shape.layers + 1


def all_reduce_seconds(bytes_: float, ranks: int, assumed: Assumptions) -> float:
    if ranks == 1:
        return 0.0
    return assumed.allreduce_latency_us / 1e6 + bytes_ / (assumed.allreduce_gb_s * 1e9)


def _prefill_model(shape: ModelShape, config: Config, card: Card, assumed: Assumptions):
    tp = config.rollout.tp
    speed = card.bf16_tflops * 1e12 * assumed.prefill_efficiency * tp

    def seconds(tokens: int) -> float:
        row = tokens * shape.hidden * engine_element(config)
        compute = forward_flops(shape, tokens, config.data.max_prompt_tokens / 2) / speed
        return compute + _all_reduces(shape) * all_reduce_seconds(row, tp, assumed) + assumed.scheduler_ms / 1e3

    return seconds


def rollout_jobs(config: Config) -> list[Job]:
    """The samples of a step, lengths shaped like the reference run's; over-sampling starts more groups."""
    r = config.rollout
    groups = math.ceil(r.prompts_per_step * r.over_sampling)
    lengths = LengthModel.like_reference(r.max_new_tokens).sample(groups * r.group_size, seed=config.run.seed)
    prompt = min(PROMPT_TOKENS_ASSUMED, config.data.max_prompt_tokens)
    return [Job(i // r.group_size, prompt, length, r.max_new_tokens) for i, length in enumerate(lengths)]


def simulate(jobs: Sequence[Job], config: Config, kv: KvCapacity, latency: Latency) -> list[Outcome]:
    """One outcome an engine; groups are dealt out in turn. Over-sampled groups are cut off once enough are done."""
    r = config.rollout
    options = r.sglang
    engine = Engine(
        kv_tokens=kv.tokens,
        max_running=int(options.get("max_running_requests") or 1 << 30),
        chunk=int(options.get("chunked_prefill_size") or DEFAULT_CHUNK),
    )
    shares = [[job for job in jobs if job.group % r.engines == index] for index in range(r.engines)]
    started = len({job.group for job in jobs})
    wanted = min(1.0, math.ceil(started / r.over_sampling) / started)
    return [
        Scheduler(share, engine, latency, math.ceil(len({j.group for j in share}) * wanted)).run()
        for share in shares
        if share
    ]


def _evaluation_seconds(spec: EvalSet, config: Config, kv: KvCapacity, latency: Latency) -> float:
    limit = spec.max_new_tokens or config.rollout.max_new_tokens
    rows = eval_rows(spec)
    lengths = LengthModel.like_reference(limit).sample(rows * spec.samples, seed=config.run.seed)
    prompt = min(PROMPT_TOKENS_ASSUMED, config.data.max_prompt_tokens)
    jobs = [Job(i // spec.samples, prompt, length, limit) for i, length in enumerate(lengths)]
    whole = config.model_copy(update={"rollout": config.rollout.model_copy(update={"over_sampling": 1.0})})
    return max(outcome.seconds for outcome in simulate(jobs, whole, kv, latency))


def eval_rows(spec: EvalSet) -> int:
    """Problems of an evaluation set: counted where the jsonl file is here, else assumed."""
    path = Path(spec.path)
    rows = ASSUMED_EVAL_ROWS
    if path.suffix == ".jsonl" and path.is_file():
        rows = sum(1 for line in path.read_text().splitlines() if line.strip())
    return min(rows, spec.limit) if spec.limit else rows


def _push_seconds(shape: ModelShape, config: Config, assumed: Assumptions) -> float:
    """Every rank gathers the whole model over its TP group."""
    bytes_ = shape.parameters * ELEMENT[config.model.dtype]
    return (
        bytes_ / (assumed.allreduce_gb_s * 1e9) if config.parallel.tp > 1 else bytes_ / (assumed.pcie_host_gb_s * 1e9)
    )


def _sleep_wake_seconds(config: Config, trainer: TrainerBytes, card: Card, assumed: Assumptions) -> float:
    """Out and in again; all cards share the host's memory bandwidth."""
    return 2 * moved_bytes(config, trainer) / host_speed(config, card, assumed)


def run_hours(config: Config, time: TimePlan) -> float:
    """Hours of the whole run: steps, saves and evaluations."""
    saves = config.run.steps // config.checkpoint.every
    return (config.run.steps * time.step + saves * time.save + evaluations(config) * time.evaluation) / 3600


def evaluations(config: Config) -> int:
    """How often the evaluation sets are run, the untouched model included."""
    during = config.run.steps // config.eval.every if config.eval.every else 0
    return during + (config.eval.baseline_repeats if config.eval.at_start and config.eval.sets else 0)


def explain(
    shape: ModelShape, config: Config, kv: KvCapacity, card: Card, assumed: Assumptions
) -> list[tuple[str, float]]:
    """(what is counted, seconds of the rollout) from bandwidth alone to everything, one cause more each time."""
    decode = decode_model(shape, config, card, assumed)
    jobs = rollout_jobs(config)
    stages = {
        "memory bandwidth alone": (0.0, 0.0, 0.0),
        "with launching the kernels": (1.0, 0.0, 0.0),
        "with all-reduce through host memory": (1.0, 1.0, 0.0),
        "with the scheduler": (1.0, 1.0, 1.0),
    }
    return [
        (name, max(o.seconds for o in simulate(jobs, config, kv, Latency(lambda t: 0.0, _scaled(decode, weights)))))
        for name, weights in stages.items()
    ]


def _scaled(decode, weights: tuple[float, float, float]):
    def seconds(requests: int, kv_tokens: float) -> float:
        parts: DecodeParts = decode(requests, kv_tokens)
        launch, reduce_, scheduler = weights
        return replace(
            parts, launch=parts.launch * launch, all_reduce=parts.all_reduce * reduce_,
            scheduler=parts.scheduler * scheduler,
        ).total  # fmt: skip

    return seconds
