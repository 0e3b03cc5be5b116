"""Figures of cards, and every constant that `plan` assumes rather than computes, each with its name and reason."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

import pynvml

from colocate_grpo.config import Config
from colocate_grpo.doctor.cards import read_cards, usable
from colocate_grpo.nvidia import has_nvidia_card

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """A GPU: capacity as the driver reports it, and the vendor's peak figures."""

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    pcie_gb_s: float


# NVIDIA's data sheet: 1,008 GB/s; 165 TFLOPS dense bf16 with fp32 accumulate; PCIe 4.0 x16.
RTX_4090 = Card("RTX 4090", 24.0, 1008.0, 165.0, 25.0)


def assumed(value: float, meaning: str) -> Any:
    """A constant that is estimated, not derived: it is printed with the plan."""
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Assumptions:
    """Constants not derived from the configuration. None of them was measured on a GPU by this project.

    Those marked * are fitted, together, to one published figure: 15 to 18 minutes of rollout for 1.15 M tokens of
    Qwen3-4B on 8 x RTX 4090. How that time is split among them is a guess.
    """

    cuda_context_gib: float = assumed(0.45, "one CUDA context with its loaded kernels; two processes a card")
    trainer_nccl_gib: float = assumed(0.75, "buffers of the trainer's NCCL communicators, a card, world size > 1")
    engine_nccl_gib: float = assumed(0.35, "buffers of an engine's NCCL communicator, a card, engine TP > 1")
    nccl_asleep_share: float = assumed(0.2, "share of the trainer's NCCL buffers that a suspend leaves behind")
    cuda_graphs_gib: float = assumed(0.8, "an engine's CUDA graphs, unless disabled")
    engine_workspace_gib: float = assumed(1.0, "an engine's prefill activations, sampling and cuBLAS buffers")
    trainer_workspace_gib: float = assumed(0.25, "the trainer's cuBLAS and varlen attention workspaces")
    fragmentation_share: float = assumed(0.06, "of the trainer's activations and temporaries, lost between blocks")
    fragmentation_floor_gib: float = assumed(0.3, "the least that the caching allocators of a card lose")
    saver_residue_gib: float = assumed(0.1, "what a sleeping process keeps besides its context")
    trainer_rss_gib: float = assumed(4.0, "host memory of one trainer rank (torch, CUDA, Megatron)")
    engine_rss_gib: float = assumed(4.5, "host memory of one engine worker")
    driver_rss_gib: float = assumed(4.0, "host memory of driver, reward workers, tokenizers and trajectories")
    nccl_shm_mib: float = assumed(64.0, "/dev/shm of one NCCL rank without P2P")
    gemm_efficiency: float = assumed(0.50, "share of the bf16 peak that the trainer's matrix products reach")
    bandwidth_efficiency: float = assumed(0.80, "share of the memory bandwidth that decoding reaches")
    eager_launch_ms_per_layer: float = assumed(1.7, "host time to launch one layer of decoding without graphs *")
    graph_launch_ms: float = assumed(1.5, "host time of one decode step with CUDA graphs")
    scheduler_ms: float = assumed(14.0, "host time of an engine step besides the model: batching, output *")
    allreduce_latency_us: float = assumed(450.0, "one small all-reduce through host memory, no P2P, all cards busy *")
    allreduce_gb_s: float = assumed(6.0, "all-reduce bandwidth through host memory (no P2P, cards busy)")
    pcie_host_gb_s: float = assumed(40.0, "all cards together to host memory")
    disk_gb_s: float = assumed(1.5, "sequential write to the checkpoint disk")
    prefill_efficiency: float = assumed(0.45, "share of the bf16 peak that prefill reaches")

    def described(self) -> list[tuple[str, float, str]]:
        """(name, value, meaning) of each."""
        return [(f.name, getattr(self, f.name), f.metadata["meaning"]) for f in fields(self)]


def runs_on_gpu(config: Config) -> bool:
    """`auto` is the CPU only on a machine with no NVIDIA device, unless a card's memory is given to plan for."""
    if config.run.device != "auto":
        return config.run.device == "cuda"
    return config.memory.gpu_gib is not None or has_nvidia_card()


def smallest_card(config: Config, nvml: Any = pynvml) -> int | None:
    """Bytes of the smallest card here that the run would use; None where there is none."""
    cards = usable(read_cards(nvml).cards, os.environ.get("CUDA_VISIBLE_DEVICES"))[: config.parallel.world_size]
    return min((card.memory for card in cards if not card.error), default=None)
