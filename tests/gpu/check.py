"""Checks and times on one NVIDIA GPU what a CPU cannot show; prints one table. At most six minutes.

    python tests/gpu/check.py

Needs torch, transformers, megatron-core and torch-memory-saver. Every check runs in a process of its own, so that
one that dies takes no other with it. `--device cpu` runs the same checks with small sizes in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

MIB = 2**20
LIMIT_SECONDS = 75


@dataclass
class Row:
    """One line of the table: what was checked, whether it held, and the figures."""

    check: str
    ok: bool
    found: str


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], object], device: Any, rounds: int = 5) -> float:
    """Best wall-clock time of a few rounds, after one to warm up."""
    work()
    best = float("inf")
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def used_bytes(device: Any) -> int:
    """Bytes in use on the whole card, by any process and any allocator."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


def attention(device: Any) -> list[Row]:
    """Packed attention and its gradients against softmax attention of every segment alone, in fp32."""
    import torch

    from colocate_grpo.train.attention import Segments, packed_attention

    large = device.type == "cuda"
    lengths, dim = ([8192, 3000, 1, 517, 4096], 128) if large else ([64, 30, 1, 17], 16)
    dtype = torch.bfloat16 if large else torch.float32
    q, k, v = (
        torch.randn(sum(lengths), heads, dim, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
    )
    segments, direction = Segments.of(lengths, device), torch.randn_like(q)
    out = packed_attention(q, k, v, segments, dim**-0.5)
    gradients = torch.autograd.grad(out, (q, k, v), direction)
    worst = {"out": 0.0, "gradient": 0.0}
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        exact_inputs = [x[part].detach().float().requires_grad_() for x in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in exact_inputs), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        exact_gradients = torch.autograd.grad(exact, exact_inputs, direction[part].float())
        worst["out"] = max(worst["out"], (out[part].float() - exact).abs().max().item())
        for found, expected in zip(gradients, exact_gradients, strict=True):
            error = (found[part].float() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
            worst["gradient"] = max(worst["gradient"], error.item())
    limit = 2e-2 if large else 1e-5
    took = milliseconds(
        lambda: torch.autograd.grad(packed_attention(q, k, v, segments, dim**-0.5), (q, k, v), direction), device
    )
    figures = f"out {worst['out']:.1e}, gradient {worst['gradient']:.1e} (limit {limit:.0e}), {took:.1f} ms"
    return [Row("packed attention = attention of each segment", max(worst.values()) <= limit, figures)]


def logprob(device: Any) -> list[Row]:
    """The fused log-prob: as exact as the naive form, in how much memory and time."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from colocate_grpo.train.logprob import VocabShard, token_logprobs
    from colocate_grpo.train.peak import peak_bytes

    large = device.type == "cuda"
    tokens, vocab, width = (4096, 32768, 2560) if large else (256, 2048, 32)
    dtype = torch.bfloat16 if large else torch.float32
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, width, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    rows = torch.arange(tokens, device=device)
    shard = VocabShard(dist.group.WORLD, vocab, False, 512 if large else 32, 1.0)

    def fused() -> tuple[Any, Any]:
        logprob, entropy = token_logprobs(hidden, weight, rows, targets, shard)
        return logprob, torch.autograd.grad((logprob + 0.1 * entropy).sum(), (hidden, weight))

    def naive() -> tuple[Any, Any]:
        log_p = F.log_softmax((hidden @ weight.t()).float(), dim=-1)
        logprob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        return logprob, torch.autograd.grad((logprob + 0.1 * entropy).sum(), (hidden, weight))

    (a, ga), (b, gb) = fused(), naive()
    error = max(
        (a - b).abs().max().item(), *((x - y).norm().item() / y.norm().item() for x, y in zip(ga, gb, strict=True))
    )
    del a, b, ga, gb
    peaks = [peak_bytes(work, device) / MIB for work in (fused, naive)]
    times = [milliseconds(work, device, 3) for work in (fused, naive)]
    if started_here:
        dist.destroy_process_group()
    limit = 2e-2 if large else 1e-4
    figures = (
        f"error {error:.1e}, {peaks[0]:.0f} MiB against {peaks[1]:.0f} naive, {times[0]:.1f} ms against {times[1]:.1f}"
    )
    return [Row("fused log-prob", error <= limit and peaks[0] < peaks[1], figures)]


def make_trainer(device: Any, scratch: Path, kind: str = "adamw") -> Any:
    """A trainer of a small random model (CUDA: about 0.4 B parameters in bf16)."""
    import small_models as small
    import torch

    from colocate_grpo.memory.saver import make_saver
    from colocate_grpo.train.parallel import Parallel
    from colocate_grpo.train.step import Trainer

    large = device.type == "cuda"
    sizes: dict[str, Any] = (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
         "head_dim": 64, "num_key_value_heads": 8, "vocab_size": 32768}
        if large
        else {}
    )  # fmt: skip
    if not (scratch / "config.json").exists():
        small.write("qwen3", scratch, torch.bfloat16, **sizes)
    config = small.make_config(
        scratch,
        model={"dtype": "bfloat16"},
        run={"device": device.type, "threads": 0},
        train={"recompute": True, "optimizer": {"kind": kind, "lr": 1e-4}},
    )
    parallel = Parallel.initialise(config)
    return Trainer.build(config, parallel, make_saver(config, parallel.device), scratch)


def batch_of(device: Any) -> list[Any]:
    import random

    import small_models as small

    rng, longest = random.Random(0), 2000 if device.type == "cuda" else 60
    return [small.make_trajectory(rng, 40, rng.randint(10, longest), i % 4, i // 4) for i in range(16)]


def saver(device: Any) -> list[Row]:
    """Each tag asleep: bytes really given back to the card, every value back bit for bit, what stays behind."""
    with tempfile.TemporaryDirectory() as scratch:
        empty = used_bytes(device) if device.type == "cuda" else 0
        trainer = make_trainer(device, Path(scratch))
        trainer.step(batch_of(device), 0)
        rows = [_one_tag(trainer, tag, device) for tag in ("gradients", "optimizer", "weights")]
        trainer.sleep(("gradients", "optimizer", "weights"))
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
            left = (used_bytes(device) - empty) / MIB
            rows.append(Row("everything asleep", left < 2048, f"{left:.0f} MiB stay beyond the bare context"))
        trainer.wake(("gradients", "optimizer", "weights"))
        after = trainer.step(batch_of(device), 1)
        figures = f"grad norm {after['train/grad_norm']:.3g}"
        rows.append(Row("training goes on after all slept", after["train/skipped"] == 0, figures))
        trainer.parallel.shutdown()
        return rows


def _one_tag(trainer: Any, tag: str, device: Any) -> Row:
    import torch

    from colocate_grpo.weights.hf import tensor_checksum

    tensors = {
        "weights": trainer.weight_buffers,
        "gradients": trainer.grad_buffers,
        "optimizer": trainer.optimizer_tensors,
    }[tag]
    owned = sum(t.nbytes for t in tensors())
    before = [tensor_checksum(t) for t in tensors()]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    held = used_bytes(device) if device.type == "cuda" else trainer.saver.resident_bytes(tag)
    trainer.sleep((tag,))
    kept = used_bytes(device) if device.type == "cuda" else trainer.saver.resident_bytes(tag)
    trainer.wake((tag,))
    intact = tag == "gradients" or before == [tensor_checksum(t) for t in tensors()]
    figures = (
        f"{owned / MIB:.1f} MiB owned, {(held - kept) / MIB:.1f} given back, values {'intact' if intact else 'CHANGED'}"
    )
    return Row(f"sleep: {tag}", intact and held - kept >= 0.9 * owned, figures)


EXPANDABLE = """
import torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(tag="t", enable_cpu_backup=True):
    inside = torch.full((64 * 2**20,), 7, dtype=torch.uint8, device="cuda")
outside = torch.full((1000,), 3.0, device="cuda")
free = torch.cuda.mem_get_info()[0]
saver.pause("t"); torch.cuda.empty_cache()
given = torch.cuda.mem_get_info()[0] - free
saver.resume("t")
assert given >= 60 * 2**20 and bool((inside == 7).all()) and bool((outside == 3).all())
print(f"gives {given / 2**20:.0f} MiB back")
"""


def expandable(device: Any) -> list[Row]:
    """Which allocator settings torch_memory_saver lives with; the default one must work. CUDA only."""
    if device.type != "cuda":
        return []
    rows = []
    for setting in ("expandable_segments:False", "expandable_segments:True"):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
        done = subprocess.run(
            [sys.executable, "-c", EXPANDABLE], capture_output=True, text=True, timeout=60, env=environment
        )
        said = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1][:90]
        works = done.returncode == 0
        rows.append(
            Row(
                f"memory saver with {setting}", works or setting.endswith("True"), said if works else f"refused: {said}"
            )
        )
    return rows


def _open_bucket(connection: Any) -> None:
    """Child process: open the bucket by its handle and send the checksum of what it sees."""
    from colocate_grpo.weights.hf import tensor_checksum

    rebuild, arguments = connection.recv()
    bucket = rebuild(*arguments)
    connection.send(tensor_checksum(bucket))
    connection.recv()  # the sender keeps the memory until here


def push(device: Any) -> list[Row]:
    """A weight bucket opened by another process on the same card (CUDA IPC; shared memory on CPU)."""
    import torch
    import torch.multiprocessing as mp
    from torch.multiprocessing.reductions import reduce_tensor

    from colocate_grpo.weights.hf import tensor_checksum

    size = (256 if device.type == "cuda" else 1) * MIB
    bucket = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    here, there = mp.get_context("spawn").Pipe()
    child = mp.get_context("spawn").Process(target=_open_bucket, args=(there,))
    child.start()
    start = time.perf_counter()
    here.send(reduce_tensor(bucket))
    same = here.poll(60) and here.recv() == tensor_checksum(bucket)
    took = time.perf_counter() - start
    here.send("done")
    child.join(30)
    verdict = "equal" if same else "DIFFER"
    figures = f"{size / MIB:.0f} MiB opened and read in {took:.2f} s (start of the process included), bytes {verdict}"
    return [Row("bucket opened by another process", bool(same), figures)]


def step(device: Any) -> list[Row]:
    """Whole training steps with both optimizers: tokens a second, peak memory, nothing skipped."""
    rows = []
    for kind in ("adamw", "sr_adamw"):
        with tempfile.TemporaryDirectory() as scratch:
            trainer = make_trainer(device, Path(scratch), kind)
            trainer.step(batch_of(device), 0)
            start = time.perf_counter()
            metrics = trainer.step(batch_of(device), 1)
            synchronize(device)
            speed = metrics["train/packed_tokens"] / (time.perf_counter() - start)
            sizes = {name: round(size / MIB) for name, size in trainer.memory_bytes().items()}
            healthy = metrics["train/skipped"] == 0 and 0 < metrics["train/grad_norm"] < float("inf")
            rows.append(Row(f"training step, {kind}", healthy, f"{speed:.0f} tokens/s, MiB {sizes}"))
            trainer.parallel.shutdown()
    return rows


def checkpoint(device: Any) -> list[Row]:
    """Save, change, load: the weights of the save are back, and the next step is the one that would have come."""
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(device, Path(scratch) / "model")
        trainer.step(batch_of(device), 0)
        kept, start = trainer.checksums(), time.perf_counter()
        trainer.save(Path(scratch) / "saved")
        saved = time.perf_counter() - start
        first = trainer.step(batch_of(device), 1)["train/grad_norm"]
        start = time.perf_counter()
        trainer.load(Path(scratch) / "saved")
        loaded = time.perf_counter() - start
        exact = trainer.checksums() == kept
        second = trainer.step(batch_of(device), 1)["train/grad_norm"]
        trainer.parallel.shutdown()
    weights = "exact" if exact else "DIFFER"
    figures = f"save {saved:.1f} s, load {loaded:.1f} s, weights {weights}, next norm {first:.6g} / {second:.6g}"
    return [Row("checkpoint", exact and abs(first - second) <= 1e-3 * first, figures)]


CHECKS: dict[str, Callable[[Any], list[Row]]] = {
    check.__name__: check for check in (attention, logprob, saver, expandable, push, step, checkpoint)
}


def run_here(name: str, device_type: str) -> list[Row]:
    """A failing check is a row, with the last line of its traceback."""
    import torch

    try:
        return CHECKS[name](torch.device(device_type))
    except Exception as error:  # the table must come out whatever one check does
        traceback.print_exc()
        return [Row(name, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:110])]


def run_apart(name: str, device_type: str) -> list[Row]:
    command = [sys.executable, "-W", "ignore", __file__, "--device", device_type, "--only", name, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return [Row(name, False, f"not done after {LIMIT_SECONDS} s")]
    lines = [line for line in done.stdout.splitlines() if line.startswith('[{"check"') or line == "[]"]
    if not lines:
        return [Row(name, False, f"died with exit code {done.returncode}: {done.stderr.strip()[-110:]}")]
    return [Row(**row) for row in json.loads(lines[-1])]


def machine(device_type: str) -> str:
    import torch

    if device_type != "cuda":
        return f"CPU, torch {torch.__version__}, Python {platform.python_version()}"
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    return f"{properties.name}, {memory:.0f} GiB, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(CHECKS))
    parser.add_argument("--json", action="store_true", help="rows as JSON on the last line")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps([asdict(row) for row in run_here(arguments.only, arguments.device)]))
        return 0
    run = run_apart if arguments.device == "cuda" else run_here
    names = [arguments.only] if arguments.only else list(CHECKS)
    rows = [row for name in names for row in run(name, arguments.device)]
    print(f"{machine(arguments.device)}\n")
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{'ok  ' if row.ok else 'FAIL'}  {row.check:<{width}}  {row.found}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
