"""Seconds of CPU of one training step, for this trainer and for plain transformers; started by test_train.py.

`python train_speed.py MODEL_DIR TP DP OUT`, under torchrun when there is more than one rank. CPU seconds; each rank has
one thread, and a step takes as long as its dearest rank. Cores share caches, memory and clock, so that CPU seconds too
depend on what runs beside: both steps are done in turns, by all ranks at once, and only their ratio says something.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import small_models as small
import torch
import torch.distributed as dist
import torch.nn.functional as F

from colocate_grpo.memory.saver import make_saver
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}
PROMPT, RESPONSE, ROWS, MICRO = 64, 192, 16, 8
ROUNDS = 5


def batch() -> list[small.Trajectory]:
    """Sixteen rows of 256 tokens: two micro-batches of 2,048 that plain transformers can run without any padding."""
    rng = random.Random(0)
    return [small.make_trajectory(rng, PROMPT, RESPONSE, i % 8, i // 8) for i in range(ROWS)]


def plain_step(rows: list[small.Trajectory]) -> Callable[[], None]:
    model = small.build("qwen3", **MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.98))
    ids = torch.tensor([t.token_ids for t in rows])
    mask = torch.tensor([t.loss_mask for t in rows])[:, 1:]
    old = torch.tensor([t.rollout_logprobs for t in rows])[:, 1:]

    def step() -> None:
        optimizer.zero_grad()
        for a in range(0, ROWS, MICRO):
            part = slice(a, a + MICRO)
            log_p = F.log_softmax(model(ids[part]).logits[:, :-1].float(), dim=-1)
            ratio = (log_p.gather(-1, ids[part][:, 1:, None])[..., 0] - old[part]).exp()
            loss = -torch.minimum(ratio * 0.5, ratio.clamp(0.8, 1.28) * 0.5)
            (loss * mask[part]).sum().div(mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    model_dir, tp, dp, out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    config = small.make_config(
        model_dir,
        parallel={"tp": tp, "dp": dp},
        rollout={"partial": {"enabled": True}},
        train={"max_tokens_per_microbatch": MICRO * (PROMPT + RESPONSE)},
    )
    parallel = Parallel.initialise(config)
    trainer = Trainer.build(config, parallel, make_saver(config, parallel.device), model_dir)
    rows = batch()
    works: dict[str, Callable[[], object]] = {"ours": lambda: trainer.step(rows if parallel.is_main else None, 0)}
    works["plain"] = plain_step(rows)
    best = dict.fromkeys(works, float("inf"))
    for round_number in range(ROUNDS + 1):
        for name, work in works.items():
            dist.barrier()
            spent = seconds(work)
            if round_number:  # the first one warms up
                best[name] = min(best[name], spent)
    dearest = torch.tensor(list(best.values()), dtype=torch.float64)
    dist.all_reduce(dearest, op=dist.ReduceOp.MAX)
    if parallel.is_main:
        found = dict(zip(best, dearest.tolist(), strict=True))
        out.write_text(json.dumps({**found, "parameters": trainer.shape.parameters}))
    parallel.shutdown()


if __name__ == "__main__":
    main()
