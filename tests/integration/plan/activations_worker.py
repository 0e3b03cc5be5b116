"""Bytes that training really takes, on small models: activations by the storage tracker, checkpoints by their files.

Arguments: output file, working directory, TP. One process, or torchrun with as many as TP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from colocate_grpo.checkpoint.state import save_state
from colocate_grpo.config import Config
from colocate_grpo.observe.storage_tracker import StorageTracker
from colocate_grpo.train.attention import Segments
from colocate_grpo.train.model import build_policy
from colocate_grpo.train.optimizer import build_optimizer
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.shape import ModelShape
from colocate_grpo.train.step import wrap

LENGTHS = (128, 256, 512)
CHUNK = 128
PASSES = 5
TIED = {
    "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "intermediate_size": 352, "vocab_size": 1024, "tie_word_embeddings": True,
}  # fmt: skip
UNTIED = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 256, "vocab_size": 2000,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"tied": TIED, "untied": UNTIED}


def config_of(tp: int, dtype: str, recompute: bool, kind: str = "adamw") -> Config:
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": "unused", "dtype": dtype},
            "data": {"train": "unused"},
            "parallel": {"tp": tp},
            "train": {"recompute": recompute, "logprob_chunk": CHUNK, "optimizer": {"kind": kind}},
        }
    )


def activation_peaks(parallel: Parallel) -> dict[str, int]:
    """`model dtype recompute tokens` -> most bytes alive in forward and backward of one micro-batch."""
    peaks = {}
    for name, hf in MODELS.items():
        for dtype in ("bfloat16", "float32"):
            for recompute in (False, True):
                policy = build_policy(ModelShape.from_hf(hf), config_of(parallel.tp, dtype, recompute), parallel)
                ddp = wrap(initialised(policy.train()), fp32_gradients=True)
                for tokens in LENGTHS:
                    # Gloo's thread may let go of a gathered tensor late, in about one pass of twenty: it only adds.
                    least = min(peak_of(ddp, tokens) for _ in range(PASSES))
                    peaks[f"{name} {dtype} {recompute} {tokens}"] = least
    return peaks


def initialised(policy: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(0.01)
    return policy


def peak_of(ddp: torch.nn.Module, tokens: int) -> int:
    segments = Segments.of([tokens], torch.device("cpu"))
    ids = torch.zeros(tokens, dtype=torch.long)
    rows = torch.arange(tokens - 1)
    with StorageTracker() as tracker:
        logprob, _ = ddp(ids, segments, rows, ids[1:])
        logprob.sum().backward()
    return tracker.peak_bytes


def checkpoint_sizes(parallel: Parallel, directory: Path) -> dict[str, int]:
    """`model dtype optimizer` -> bytes of all files that `Trainer.save` writes."""
    sizes = {}
    for dtype, kind in (("bfloat16", "adamw"), ("float32", "adamw"), ("bfloat16", "sr_adamw")):
        for name, hf in MODELS.items():
            config = config_of(parallel.tp, dtype, True, kind)
            ddp = wrap(initialised(build_policy(ModelShape.from_hf(hf), config, parallel)), kind == "adamw")
            target = directory / f"{name}_{dtype}_{kind}_{parallel.tp}"
            save_state(target, ddp.module, build_optimizer(config, ddp, parallel))
            dist.barrier()
            sizes[f"{name} {dtype} {kind}"] = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    return sizes


def main(out: Path, directory: Path, tp: int) -> None:
    parallel = Parallel.initialise(config_of(tp, "float32", False))
    results = {"activations": activation_peaks(parallel), "checkpoints": checkpoint_sizes(parallel, directory)}
    if parallel.is_main:
        out.write_text(json.dumps(results))
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
