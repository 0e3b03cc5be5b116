"""The training step against plain transformers + AdamW, its scaling over two ranks, and the memory of the log-prob."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_models as small
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_speed

from colocate_grpo.train.logprob import VocabShard, token_logprobs
from colocate_grpo.train.peak import peak_bytes

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(1500)  # a limit for hangs
TOKENS = train_speed.ROWS * (train_speed.PROMPT + train_speed.RESPONSE)
MIB = 2**20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write("qwen3", tmp_path_factory.mktemp("speed") / "qwen3", **train_speed.MODEL)


@pytest.fixture(scope="module")
def single(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return measure(model_dir, 1, 1, tmp_path_factory.mktemp("single"))


def measure(model_dir: Path, tp: int, dp: int, scratch: Path) -> dict[str, float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if tp * dp > 1 else []
    out, log = scratch / "seconds.json", scratch / "log.txt"
    arguments = [str(model_dir), str(tp), str(dp), str(out)]
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, str(HERE / "train_speed.py"), *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=1400,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)},
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    found = json.loads(out.read_text())
    print({name: round(TOKENS / value) for name, value in found.items() if name != "parameters"}, "tokens a CPU second")
    return found


def test_step_is_as_fast_as_transformers(single: dict[str, float]) -> None:
    assert single["parameters"] == pytest.approx(5e6, rel=0.1)
    assert speed(single) >= 0.9


def speed(found: dict[str, float]) -> float:
    """Times that of plain transformers on one rank, in the same process."""
    return found["plain"] / found["ours"]


@pytest.mark.parametrize(("tp", "dp", "least"), [(2, 1, 1.0), (1, 2, 1.3)])
def test_two_ranks_are_faster_than_one(
    model_dir: Path, single: dict[str, float], tp: int, dp: int, least: float, tmp_path: Path
) -> None:
    assert speed(measure(model_dir, tp, dp, tmp_path)) / speed(single) >= least


def test_memory_and_time_of_the_fused_logprob() -> None:
    """Vocabulary 32k, hidden 256, chunk 256, fp32, forward and backward, both forms in this one run. Memory at
    T = 4,096; time at a quarter of that, in many short turns, the best of each: other load only adds.
    """
    vocab, hidden_size = 32768, 256
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time of one thread: waiting threads that spin would count as work
    shard = VocabShard(dist.group.WORLD, vocab, False, 256, 1.0)  # type: ignore[arg-type]
    weight = (torch.randn(vocab, hidden_size) * 0.05).requires_grad_()
    targets = torch.randint(0, vocab, (4096,))

    def fused(tokens: int) -> None:
        hidden = torch.randn(tokens, hidden_size, requires_grad=True)
        logprob, entropy = token_logprobs(hidden, weight, torch.arange(tokens), targets[:tokens], shard)
        (logprob.sum() + 0.1 * entropy.sum()).backward()
        weight.grad = None

    def naive(tokens: int) -> None:
        hidden = torch.randn(tokens, hidden_size, requires_grad=True)
        log_p = F.log_softmax((hidden @ weight.t()).float(), dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, targets[:tokens, None]).sum() + 0.1 * entropy.sum()).backward()
        weight.grad = None

    try:
        peaks = {
            work.__name__: peak_bytes(lambda work=work: work(4096), torch.device("cpu")) / MIB
            for work in (fused, naive)
        }
        times: dict[str, list[float]] = {"fused": [], "naive": []}
        for _ in range(6):
            for work in (fused, naive):
                start = time.thread_time()
                work(1024)
                times[work.__name__].append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
    print(peaks, times)
    assert peaks["fused"] <= 160
    assert peaks["naive"] > 2000
    assert min(times["fused"]) <= 1.2 * min(times["naive"])
