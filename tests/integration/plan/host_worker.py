"""Host memory that saving and loading really take, on a small model: the kernel's own peak of each rank.

Arguments: working directory. Run by torchrun; every rank writes `rank_R.json`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from activations_worker import config_of, initialised

from colocate_grpo.checkpoint.state import load_state, save_state
from colocate_grpo.config import Config
from colocate_grpo.train.model import build_policy
from colocate_grpo.train.optimizer import build_optimizer
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.shape import ModelShape
from colocate_grpo.train.step import wrap

# Large enough that the states outweigh what Python and gloo allocate besides.
HF = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 16384,
    "tie_word_embeddings": True,
}  # fmt: skip
KINDS = ("adamw", "sr_adamw")


def config(dp: int, kind: str) -> Config:
    values = config_of(1, "bfloat16", True, kind)
    return values.model_copy(update={"parallel": values.parallel.model_copy(update={"dp": dp})})


def peak_of(work: Callable[[], None]) -> int:
    """Bytes of resident memory that `work` needed at its worst moment beyond what was there before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed would else be used again, and count for nothing
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(parallel: Parallel, kind: str, directory: Path) -> dict[str, int]:
    ddp = wrap(initialised(build_policy(ModelShape.from_hf(HF), config(parallel.dp, kind), parallel)), kind == "adamw")
    optimizer = build_optimizer(config(parallel.dp, kind), ddp, parallel)
    saved = peak_of(lambda: save_state(directory / kind, ddp.module, optimizer))
    dist.barrier()
    loaded = peak_of(lambda: load_state(directory / kind, ddp.module, optimizer))
    dist.barrier()
    return {"save": saved, "load": loaded}


def main(directory: Path) -> None:
    parallel = Parallel.initialise(config(2, "adamw"))
    found = {kind: measure(parallel, kind, directory) for kind in KINDS}
    (directory / f"rank_{parallel.rank}.json").write_text(json.dumps(found))
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
