"""GPU memory by phase and class, from the configuration alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from colocate_grpo.config import Config
from colocate_grpo.plan.activations import MicroBatch, activation_peak
from colocate_grpo.plan.hardware import GIB, MIB, Assumptions, runs_on_gpu
from colocate_grpo.plan.model_shape import engine_parameters, kv_bytes_per_token, rank_tensors
from colocate_grpo.rollout.sglang_options import cpu_kv_tokens
from colocate_grpo.train.shape import ModelShape

ELEMENT = {"bfloat16": 2, "float32": 4}
# Rows beside the ledger's classes: real bytes that no owner can put to sleep.
EXTRA_CLASSES = ("contexts", "workspace", "fragmentation")
CLASSES = (
    "weights", "gradients", "optimizer", "activations", "nccl", "engine_weights", "kv_cache", "cuda_graphs",
    *EXTRA_CLASSES,
)  # fmt: skip
# The stochastic-rounding optimizer works through chunks of 2**22 values, in fp32 and with 64-bit random numbers.
STOCHASTIC_CHUNK_BYTES = 2**22 * 64
# What SGLang gives FlashInfer, in MiB: by family, else, and where it is deterministic. Neither sleep nor wake moves it.
FLASHINFER_MIB = {"qwen2": 512, "qwen3": 512}
FLASHINFER_OTHERS_MIB, FLASHINFER_DETERMINISTIC_MIB = 384, 2048
PHASES = ("engine_start", "rollout", "train", "update", "save", "push")


@dataclass(frozen=True)
class TrainerBytes:
    """Static bytes of one trainer rank, as Megatron's flat buffers allocate them."""

    weights: int
    gradients: int
    optimizer: int
    update_temporaries: int
    save_temporaries: int


@dataclass(frozen=True)
class KvCapacity:
    """Room for keys and values on one engine."""

    bytes: int
    bytes_per_token: int
    full_length: int

    @property
    def tokens(self) -> int:
        return max(0, self.bytes) // self.bytes_per_token

    @property
    def sequences(self) -> int:
        """How many sequences of the longest allowed length fit at once."""
        return self.tokens // self.full_length


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one card: `table[phase][class]`; `budget` is the card.

    `suggested_fraction` is SGLang's static share that this plan counts on, where the configuration sets none;
    `asleep` is what stays on a card while trainer and engine both sleep.
    """

    budget: int
    trainer: TrainerBytes
    kv: KvCapacity
    table: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    suggested_fraction: float | None = None
    asleep: int = 0

    def total(self, phase: str) -> int:
        return sum(self.table[phase].values())

    def problems(self) -> list[str]:
        """One sentence for each thing that does not fit."""
        over = [
            f"{phase}: {self.total(phase) / GIB:.2f} GiB on a card of {self.budget / GIB:.2f} GiB "
            f"({(self.total(phase) - self.budget) / GIB:.2f} GiB too much; {_largest(self.table[phase])})"
            for phase in self.table
            if self.total(phase) > self.budget
        ]
        if self.kv.sequences < 1:
            over.append(
                f"rollout: the KV cache holds {self.kv.tokens:,} tokens, the longest sequence has "
                f"{self.kv.full_length:,}"
            )
        return over


def _largest(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {rows[name] / GIB:.2f}" for name in sorted(rows, key=lambda n: -rows[n])[:3])


def longest_training_sequence(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def longest_sequence(config: Config) -> int:
    """Prompt and answer, of training and of every evaluation set."""
    answers = [s.max_new_tokens or config.rollout.max_new_tokens for s in config.eval.sets]
    return config.data.max_prompt_tokens + max([config.rollout.max_new_tokens, *answers])


def flat_elements(shape: ModelShape, tp: int, dp: int) -> int:
    """Elements of Megatron's flat parameter buffer: every tensor begins at a multiple of 64, the end is padded."""
    used = sum(math.ceil(n / 64) * 64 for n in rank_tensors(shape, tp))
    multiple = math.lcm(dp, 128)
    return math.ceil(used / multiple) * multiple


def trainer_bytes(shape: ModelShape, config: Config) -> TrainerBytes:
    """What one rank holds: a flat buffer of weights, one of gradients, and its DP share of optimizer state.

    With stochastic rounding a save gathers one moment at a time on the card.
    """
    elements = flat_elements(shape, config.parallel.tp, config.parallel.dp)
    share = elements // config.parallel.dp
    element = ELEMENT[config.model.dtype]
    if config.train.optimizer.kind == "sr_adamw":
        return TrainerBytes(elements * 2, elements * 2, share * 2 * 2, STOCHASTIC_CHUNK_BYTES, elements * 2)
    masters = 0 if element == 4 else 4
    return TrainerBytes(elements * element, elements * 4, share * (8 + masters), 0, 0)


def engine_element(config: Config) -> int:
    return ELEMENT[config.rollout.dtype or config.model.dtype]


def kv_element(config: Config) -> int:
    return engine_element(config) if config.memory.kv_dtype == "auto" else 1


def micro_batch(config: Config) -> MicroBatch:
    """The largest micro-batch: the packing cap, or the longest allowed sequence, which goes alone."""
    return MicroBatch(
        tokens=max(config.train.max_tokens_per_microbatch, longest_training_sequence(config)),
        tp=config.parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        element=ELEMENT[config.model.dtype],
        chunk=config.train.logprob_chunk,
        recompute=config.train.recompute,
        kernels="fused" if runs_on_gpu(config) else "composite",
        entropy=config.algorithm.entropy_coef > 0,
        fp32_gradients=config.train.optimizer.kind == "adamw",
    )


def plan_memory(shape: ModelShape, config: Config, budget: int, assumed: Assumptions) -> MemoryPlan:
    """The whole table of a card; `budget` is its bytes."""
    trainer = trainer_bytes(shape, config)
    overhead = _overheads(config, assumed)
    engine = _engine_rows(shape, config, assumed)
    kv = kv_capacity(shape, config, budget, assumed)
    trainer_rows = {"weights": trainer.weights, "gradients": trainer.gradients, "optimizer": trainer.optimizer,
                    "nccl": overhead["nccl"], "contexts": overhead["contexts"]}  # fmt: skip
    activations = activation_peak(shape, micro_batch(config))
    # SGLang keeps graphs out of its saver, unless SGLANG_MEMORY_SAVER_CUDA_GRAPH is set.
    asleep = {"workspace": _engine_asleep(shape, config, assumed), "cuda_graphs": engine["cuda_graphs"]}
    residue = {"contexts": overhead["contexts"], "nccl": overhead["nccl_asleep"], "workspace": overhead["residue"]}
    table = {
        "engine_start": {**engine, "kv_cache": kv.bytes, "contexts": overhead["contexts"]},
        "rollout": {**engine, "kv_cache": kv.bytes, **residue, "workspace": engine["workspace"] + residue["workspace"]},
        "train": _sum(trainer_rows, _working(activations, assumed), asleep),
        "update": _sum(trainer_rows, _working(trainer.update_temporaries, assumed), asleep),
        "save": _sum(trainer_rows, _working(trainer.save_temporaries, assumed), asleep),
        "push": {"weights": trainer.weights, "engine_weights": engine["engine_weights"],
                 "cuda_graphs": engine["cuda_graphs"],
                 "contexts": overhead["contexts"], "nccl": overhead["nccl"],
                 "workspace": _push_buckets(shape, config) + asleep["workspace"],
                 "fragmentation": _fragmentation(0, assumed)},
    }  # fmt: skip
    fraction = _suggested_fraction(config, budget, engine, kv, assumed)
    kept = sum(residue.values()) + _engine_buffers(shape, config, assumed) + engine["cuda_graphs"]
    return MemoryPlan(budget, trainer, kv, table, fraction, kept)


def _sum(*rows: Mapping[str, int]) -> dict[str, int]:
    """Rows of several owners, bytes of the same class added."""
    return {name: sum(row.get(name, 0) for row in rows) for name in dict.fromkeys(n for row in rows for n in row)}


def _working(temporary: int, assumed: Assumptions) -> dict[str, int]:
    return {
        "activations": temporary,
        "workspace": _bytes(assumed.trainer_workspace_gib),
        "fragmentation": _fragmentation(temporary, assumed),
    }


def _fragmentation(temporary: int, assumed: Assumptions) -> int:
    return _bytes(assumed.fragmentation_floor_gib) + int(assumed.fragmentation_share * temporary)


def _overheads(config: Config, assumed: Assumptions) -> dict[str, int]:
    """Bytes that no owner can put to sleep: all of them are CUDA's and NCCL's."""
    if not runs_on_gpu(config):
        return {"contexts": 0, "nccl": 0, "nccl_asleep": 0, "residue": 0}
    processes = 2 if config.rollout.engine == "sglang" else 1
    nccl = _bytes(assumed.trainer_nccl_gib) if config.parallel.world_size > 1 else 0
    return {
        "contexts": processes * _bytes(assumed.cuda_context_gib),
        "nccl": nccl,
        "nccl_asleep": int(nccl * assumed.nccl_asleep_share),
        "residue": processes * _bytes(assumed.saver_residue_gib),
    }


def _engine_rows(shape: ModelShape, config: Config, assumed: Assumptions) -> dict[str, int]:
    weights = engine_parameters(shape, config.rollout.tp) * engine_element(config)
    if not runs_on_gpu(config):
        return {"engine_weights": weights, "cuda_graphs": 0, "workspace": 0}
    graphs = 0 if config.rollout.engine == "embedded" or no_cuda_graphs(config) else _bytes(assumed.cuda_graphs_gib)
    buffers = _engine_buffers(shape, config, assumed)
    return {
        "engine_weights": weights, "cuda_graphs": graphs, "workspace": buffers + _bytes(assumed.engine_workspace_gib),
    }  # fmt: skip


def _engine_buffers(shape: ModelShape, config: Config, assumed: Assumptions) -> int:
    """What an engine holds awake and asleep: NCCL's buffers and FlashInfer's workspace."""
    if config.rollout.engine != "sglang" or not runs_on_gpu(config):
        return 0
    options = config.rollout.sglang
    nccl = _bytes(assumed.engine_nccl_gib) if config.rollout.tp > 1 else 0
    if options.get("attention_backend") not in (None, "flashinfer"):
        return nccl
    if options.get("enable_deterministic_inference"):
        return nccl + FLASHINFER_DETERMINISTIC_MIB * MIB
    return nccl + FLASHINFER_MIB.get(shape.family, FLASHINFER_OTHERS_MIB) * MIB


def _engine_asleep(shape: ModelShape, config: Config, assumed: Assumptions) -> int:
    """What a sleeping engine process keeps of a card besides its context."""
    if config.rollout.engine != "sglang" or not runs_on_gpu(config):
        return 0
    return _engine_buffers(shape, config, assumed) + _bytes(assumed.saver_residue_gib)


def no_cuda_graphs(config: Config) -> bool:
    return bool(config.rollout.sglang.get("disable_cuda_graph", False))


def kv_capacity(shape: ModelShape, config: Config, budget: int, assumed: Assumptions) -> KvCapacity:
    """SGLang's rule: the static share of what is free at its start, less its weights; or all that the card leaves."""
    per_token = kv_bytes_per_token(shape, config.rollout.tp, kv_element(config))
    if config.rollout.engine == "embedded":
        tokens = config.rollout.slots * longest_sequence(config)
        return KvCapacity(tokens * per_token, per_token, longest_sequence(config))
    engine, overhead = _engine_rows(shape, config, assumed), _overheads(config, assumed)
    rest = sum(engine.values()) + overhead["contexts"] + overhead["nccl_asleep"] + overhead["residue"]
    room = budget - rest
    fraction = config.rollout.sglang.get("mem_fraction_static")
    if fraction is not None:
        free_at_start = budget - _bytes(assumed.cuda_context_gib)
        room = int(free_at_start * float(fraction)) - engine["engine_weights"]
    limit = config.rollout.sglang.get("max_total_tokens") or (None if runs_on_gpu(config) else cpu_kv_tokens(config))
    return KvCapacity(min(room, int(limit) * per_token) if limit else room, per_token, longest_sequence(config))


def _suggested_fraction(
    config: Config, budget: int, engine: Mapping[str, int], kv: KvCapacity, assumed: Assumptions
) -> float | None:
    if config.rollout.engine != "sglang" or "mem_fraction_static" in config.rollout.sglang or not runs_on_gpu(config):
        return None
    return (engine["engine_weights"] + max(0, kv.bytes)) / (budget - _bytes(assumed.cuda_context_gib))


def _push_buckets(shape: ModelShape, config: Config) -> int:
    """A gathered bucket, its flattened copy, and the engine's copy while it loads. A larger tensor goes alone."""
    width = max(shape.padded_vocab(config.parallel.tp), shape.ffn, shape.heads * shape.head_dim)
    largest = width * shape.hidden * ELEMENT[config.model.dtype]
    return 3 * max(config.rollout.bucket_mib * MIB, largest)


def _bytes(gib: float) -> int:
    return int(gib * GIB)
