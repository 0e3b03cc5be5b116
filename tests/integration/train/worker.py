"""Runs under torchrun: every check of one world size, results as JSON. Started by test_parallel.py."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import small_models as small
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from colocate_grpo.memory.saver import make_saver
from colocate_grpo.train.attention import Segments
from colocate_grpo.train.batch import make_samples
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer
from colocate_grpo.weights.hf import hf_tensors, tensor_checksum

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(4, 1), (2, 2), (1, 4)]}
OLD_FROM_ROLLOUT = {"partial": {"enabled": True}, "max_new_tokens": 2048}
Results = dict[str, Any]


@contextmanager
def trainer_of(config: Any) -> Iterator[Trainer]:
    parallel = Parallel.initialise(config)
    try:
        yield Trainer.build(config, parallel, make_saver(config, parallel.device), Path(config.model.path))
    finally:
        parallel.shutdown()


def full_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gradients by Hugging Face name: DP shards are gathered first."""
    for buffer in trainer.ddp.buffers:
        for bucket in buffer.buckets:
            mine = bucket.grad_data.chunk(trainer.parallel.dp)[trainer.parallel.dp_rank].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=trainer.parallel.dp_group)
    local = {name: p.main_grad for name, p in trainer.policy.named_parameters()}
    return {n: g.clone() for n, g in hf_tensors(local, trainer.shape, trainer.parallel.tp_group)}


def packed_logits(trainer: Trainer, batch: list[Any]) -> list[torch.Tensor]:
    """Full-vocabulary logits of every trajectory, from one packed micro-batch."""
    lengths = [len(t.token_ids) for t in batch]
    padding = -sum(lengths) % trainer.parallel.tp
    tokens = torch.tensor([i for t in batch for i in t.token_ids] + [0] * padding)
    segments = Segments.of(lengths + [padding] * (padding > 0), torch.device("cpu"))
    local = trainer.policy.logits(tokens, segments)
    shards = [torch.empty_like(local) for _ in range(trainer.parallel.tp)]
    dist.all_gather(shards, local.contiguous(), group=trainer.parallel.tp_group)
    full = torch.cat(shards, dim=1)[:, : trainer.shape.vocab]
    return list(full[: sum(lengths)].split(lengths))


def one_segment(length: int) -> tuple[torch.Tensor, Segments]:
    return torch.arange(length), Segments.of([length], torch.device("cpu"))


def largest(pairs: Any) -> float:
    return max((a - b).abs().max().item() for a, b in pairs)


@torch.no_grad()
def check_forward(trainer: Trainer, model: Any, batch: list[Any], temperature: float) -> Results:
    expected = [small.plain_logprobs(model, t, temperature) for t in batch]
    found = trainer.logprobs(batch if trainer.parallel.is_main else None)
    logits = packed_logits(trainer, batch)
    return {
        "logits": largest(
            (a, model(torch.tensor([t.token_ids])).logits[0]) for a, t in zip(logits, batch, strict=True)
        ),
        "logprobs": largest((torch.from_numpy(a), b[0]) for a, b in zip(found, expected, strict=True)),
        "entropy": sum(e.sum().item() for _, e in expected) / sum(e.numel() for _, e in expected),
    }


def check_gradient(trainer: Trainer, model: Any, batch: list[Any], aggregation: str = "token_mean") -> Results:
    samples = make_samples(batch, trainer.config)
    for sample in samples:
        sample.old_logprobs = sample.rollout_logprobs
    measures = trainer.accumulate(samples)
    found = full_gradients(trainer)
    model.zero_grad()
    advantages, temperature = [s.advantage for s in samples], trainer.config.rollout.temperature
    loss = small.plain_loss(model, batch, advantages, aggregation, temperature)
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    error = torch.stack([(found[n] - g).norm() for n, g in expected.items()]).norm().item()
    return {
        "loss": abs(measures.loss - loss.item()),
        "gradients": largest((found[n], g) for n, g in expected.items()),
        "relative": error / norm,
        "norm": norm,
        "measured_entropy": measures.entropy / measures.tokens,
    }


def check_steps(trainer: Trainer, model: Any, steps: int = 10) -> Results:
    """Optimizer steps against transformers + AdamW: worst difference of loss and gradient norm."""
    settings = trainer.config.train.optimizer
    model = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    losses, norms = [], []
    for step in range(steps):
        batch = small.make_batch(100 + step)
        metrics = trainer.step(batch if trainer.parallel.is_main else None, step)
        plain.zero_grad()
        loss = small.plain_loss(model, batch, [s.advantage for s in make_samples(batch, trainer.config)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        plain.step()
        losses.append(abs(metrics["train/loss"] - loss.item()))
        norms.append(abs(metrics["train/grad_norm"] - norm.item()))
    return {"losses": losses, "norms": norms}


def parity_cases(tp: int, dp: int) -> Iterator[tuple[str, bool, bool]]:
    """(family, sequence parallel, recompute): all of them where only TP matters, one where DP comes in."""
    if dp > 1:
        yield "qwen3", tp > 1, True
        return
    for sequence_parallel in (False, True) if tp > 1 else (False,):
        for recompute in (False, True):
            yield "qwen3", sequence_parallel, recompute
    yield "llama", tp > 1, False
    yield "qwen2", tp > 1, False


def parity(models: Path, world: int) -> Iterator[tuple[str, Results]]:
    batch = small.make_batch(5)
    for tp, dp in LAYOUTS[world]:
        for family, sequence_parallel, recompute in parity_cases(tp, dp):
            config = small.make_config(
                models / family,
                parallel={"tp": tp, "dp": dp, "sequence_parallel": sequence_parallel},
                train={"recompute": recompute, "max_tokens_per_microbatch": 150, "logprob_chunk": 32},
                rollout={**OLD_FROM_ROLLOUT, "temperature": 0.7 if family == "llama" else 1.0},
            )
            name = f"{family} tp{tp} dp{dp} sp{int(sequence_parallel)} recompute{int(recompute)}"
            with trainer_of(config) as trainer:
                yield name, one_parity(trainer, models / family, batch, config.rollout.temperature)


def one_parity(trainer: Trainer, model_dir: Path, batch: list[Any], temperature: float) -> Results:
    model = small.build(model_dir.name)
    results = check_forward(trainer, model, batch, temperature)
    results |= check_gradient(trainer, model, batch)
    rows = trainer.policy.hidden_states(*one_segment(16)).shape[0]
    results["sharded"] = rows == (16 // trainer.parallel.tp if trainer.policy.shard.sequence_parallel else 16)
    disk = {n: tensor_checksum(t) for n, t in load_file(model_dir / "model.safetensors").items()}
    results["import_exact"] = trainer.checksums() == disk
    return results


def optimizer_steps(models: Path, world: int) -> Iterator[tuple[str, Results]]:
    for tp, dp in LAYOUTS[world]:
        config = small.make_config(
            models / "qwen3",
            parallel={"tp": tp, "dp": dp},
            rollout=OLD_FROM_ROLLOUT,
            train={
                "max_tokens_per_microbatch": 200,
                "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "grad_clip": 0.5},
            },
        )
        with trainer_of(config) as trainer:
            yield f"tp{tp} dp{dp}", check_steps(trainer, small.build("qwen3"))


def invariance(models: Path, world: int) -> Iterator[tuple[str, Results]]:
    """Ragged batches under every aggregation, one so small that DP ranks stay without a micro-batch.

    In one process hypothesis does this (test_invariance.py).
    """
    batches = [small.make_batch(1, 3, 3, 6), small.make_batch(2, 3, 3, 400), small.make_batch(3, 1, 2, 30)]
    model = small.build("qwen3")
    for tp, dp in LAYOUTS[world]:
        config = small.make_config(
            models / "qwen3",
            parallel={"tp": tp, "dp": dp},
            rollout=OLD_FROM_ROLLOUT,
            train={"max_tokens_per_microbatch": 300},
        )
        with trainer_of(config) as trainer:
            for aggregation in ("token_mean", "sequence_mean", "constant"):
                algorithm = config.algorithm.model_copy(update={"aggregation": aggregation})
                trainer.config = config.model_copy(update={"algorithm": algorithm})
                worst = max(check_gradient(trainer, model, b, aggregation)["relative"] for b in batches)
                yield f"tp{tp} dp{dp} {aggregation}", {"relative": worst}


def saved_layout(models: Path, kind: str, tp: int, dp: int) -> Any:
    """A configuration of the checkpoint checks: fp32 AdamW, bf16 with masters, bf16 with stochastic rounding."""
    bf16 = kind != "fp32"
    return small.make_config(
        models / ("qwen3_bf16" if bf16 else "qwen3"),
        model={"dtype": "bfloat16" if bf16 else "float32"},
        parallel={"tp": tp, "dp": dp},
        train={
            "max_tokens_per_microbatch": 200,
            "optimizer": {
                "kind": "sr_adamw" if kind == "stochastic" else "adamw",
                "lr": 1e-3,
                "weight_decay": 0.1,
            },
        },
    )


def steps(trainer: Trainer, first: int, count: int) -> list[dict[str, float]]:
    found = []
    for step in range(first, first + count):
        metrics = trainer.step(small.make_batch(300 + step) if trainer.parallel.is_main else None, step)
        found.append({k: v for k, v in metrics.items() if not k.startswith("perf/")})
    return found


def moment_sums(trainer: Trainer) -> list[float]:
    """Sums of all first and all second moments over the whole model: the same under every layout."""
    inner = trainer.optimizer
    if hasattr(inner, "moments"):
        owned = [(p.counts, m[p.owned]) for m in inner.moments.values() for p in inner.pieces]
        parts = [owned[: len(inner.pieces)], owned[len(inner.pieces) :]]
    else:
        states = [
            (getattr(param, "tensor_model_parallel", False) or trainer.parallel.tp_rank == 0, state)
            for param, state in inner.inner.optimizer.state.items()
        ]
        parts = [[(c, s["exp_avg"]) for c, s in states], [(c, s["exp_avg_sq"]) for c, s in states]]
    sums = torch.tensor([sum(t.double().sum().item() for c, t in part if c) for part in parts], dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def saving(models: Path, shared: Path) -> Iterator[tuple[str, Results]]:
    """World 4: save under TP 2 x DP 2, go on, come back, go on again."""
    for kind in ("fp32", "masters", "stochastic"):
        with trainer_of(saved_layout(models, kind, 2, 2)) as trainer:
            steps(trainer, 0, 2)
            at_save, moments = trainer.checksums(), moment_sums(trainer)
            trainer.save(shared / kind)
            went_on, after = steps(trainer, 2, 2), trainer.checksums()
            trainer.load(shared / kind)
            back = trainer.checksums() == at_save and moment_sums(trainer) == moments
            again = steps(trainer, 2, 2) == went_on and trainer.checksums() == after
            if trainer.parallel.is_main:
                kept = {"checksums": at_save, "moments": moments, "went_on": went_on}
                (shared / f"{kind}.json").write_text(json.dumps(kept))
            yield kind, {"back": back, "again": again, "replicas": replicas_equal(trainer)}


def replicas_equal(trainer: Trainer) -> bool:
    """Norm weights are copies on every TP and DP rank, all weights on every DP rank."""
    whole = torch.cat([p.detach().float().flatten() for n, p in trainer.policy.named_parameters() if "norm" in n])
    everyone = [torch.empty_like(whole) for _ in range(trainer.parallel.world)]
    dist.all_gather(everyone, whole)
    buffer = trainer.ddp.buffers[0].param_data.float()
    peers = [torch.empty_like(buffer) for _ in range(trainer.parallel.dp)]
    dist.all_gather(peers, buffer, group=trainer.parallel.dp_group)
    return all(torch.equal(whole, e) for e in everyone) and all(torch.equal(buffer, p) for p in peers)


def resharding(models: Path, shared: Path, world: int) -> Iterator[tuple[str, Results]]:
    """Load what `saving` wrote under another layout and go on."""
    for kind in ("fp32", "masters", "stochastic"):
        kept = json.loads((shared / f"{kind}.json").read_text())
        for tp, dp in LAYOUTS[world]:
            if (tp, dp) == (2, 2):
                continue
            with trainer_of(saved_layout(models, kind, tp, dp)) as trainer:
                trainer.load(shared / kind)
                weights = trainer.checksums() == kept["checksums"]
                moments = moment_sums(trainer)
                clocks = step_clocks(trainer)
                went_on = steps(trainer, 2, 2)
                yield (
                    f"{kind} tp{tp} dp{dp}",
                    {
                        "weights": weights,
                        "moments": [[a, b] for a, b in zip(moments, kept["moments"], strict=True)],
                        "norms": [
                            [a["train/grad_norm"], b["train/grad_norm"]]
                            for a, b in zip(went_on, kept["went_on"], strict=True)
                        ],
                        "clocks": [clocks, step_clocks(trainer)],
                    },
                )


def step_clocks(trainer: Trainer) -> list[float]:
    """[distinct step tensors per parameter, smallest and largest step]: one shared tensor would run ahead."""
    if not hasattr(trainer.optimizer, "inner"):
        return [1.0, trainer.optimizer.steps, trainer.optimizer.steps]
    clocks = [state["step"] for state in trainer.optimizer.inner.optimizer.state.values()]
    values = [clock.item() for clock in clocks]
    return [len({id(clock) for clock in clocks}) / len(clocks), min(values), max(values)]


def non_finite(models: Path, world: int) -> Iterator[tuple[str, Results]]:
    """A NaN in one DP rank's gradient skips the step everywhere and leaves weights and moments alone."""
    for kind in ("fp32", "stochastic"):
        tp, dp = LAYOUTS[world][-1]
        with trainer_of(saved_layout(models, kind, tp, dp)) as trainer:
            steps(trainer, 0, 1)
            before = trainer.checksums(), moment_sums(trainer), step_clocks(trainer)
            batch = small.make_batch(1)
            batch[0].verdict = small.Verdict(float("nan"), "correct")
            metrics = trainer.step(batch if trainer.parallel.is_main else None, 1)
            after = trainer.checksums(), moment_sums(trainer), step_clocks(trainer)
            next_norm = steps(trainer, 2, 1)[0]["train/grad_norm"]
            yield kind, {"skipped": metrics["train/skipped"], "untouched": before == after, "next_norm": next_norm}


def told(cases: Iterator[tuple[str, Results]]) -> Iterator[tuple[str, Results]]:
    """Each case on the log as it is done: what a time-out shows."""
    for name, case in cases:
        print(f"{time.monotonic():.0f} s: {name}", flush=True)
        yield name, case


def main() -> None:
    models, shared, out = (Path(argument) for argument in sys.argv[1:4])
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    results: dict[str, Results] = {}
    for check in (parity, optimizer_steps, invariance, non_finite):
        results[check.__name__] = dict(told(check(models, world)))
    if world == max(LAYOUTS):
        results["saving"] = dict(told(saving(models, shared)))
    results["resharding"] = dict(told(resharding(models, shared, world)))
    if rank == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
