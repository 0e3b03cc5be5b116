"""The embedded engine against Hugging Face `generate`: same model, same prompts, same number of tokens.

Both run on one thread and CPU time is compared. Other load still takes caches and clock from both, not always to the
same extent, and only adds: rounds alternate, the best of each counts, and they go on for a while where it is close.
`generate` returns no log-probs here, which the engine always does: the comparison favours `generate`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from colocate_grpo.config import Config
from colocate_grpo.demo.task import split
from colocate_grpo.demo.tokenizer import build_tokenizer
from colocate_grpo.demo.warmup import build_model
from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.engine import Request, Sampling

SLOTS = 256
GROUP = 8
ROUNDS, PATIENCE_S = 3, 150


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """The demo's model (untrained: lengths are forced), its prompts, and an engine that holds its weights."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    model.save_pretrained(directory)
    config = Config.model_validate(
        {
            "model": {"path": str(directory), "dtype": "float32"},
            "data": {"train": "unused"},
            "run": {"threads": 1},
            "rollout": {"slots": SLOTS},
        }
    )
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], tokenize=False, add_generation_prompt=True
        )
        for p in split()[0][:128]
    ]
    prompts = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    engine = EmbeddedEngine(config, directory)
    runner = asyncio.Runner()
    runner.run(_push(engine, model))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield model, engine, runner, prompts
    torch.set_num_threads(before)
    runner.run(engine.stop())
    runner.close()


async def _push(engine, model):
    await engine.start()
    await engine.begin_update(0)
    await engine.apply_bucket([(name, p.detach()) for name, p in model.named_parameters()])
    await engine.end_update()


def ragged_lengths(count: int) -> list[int]:
    """Log-normal with median 24 and mean 33, the longest 192."""
    rng = random.Random(0)
    sigma = math.sqrt(2 * math.log(33 / 24))
    drawn = [min(192, max(1, round(rng.lognormvariate(math.log(24), sigma)))) for _ in range(count - 1)]
    return [*drawn, 192]


def cpu_seconds(work: Callable[[], int]) -> tuple[float, int]:
    started = time.process_time()
    tokens = work()
    return time.process_time() - started, tokens


def with_engine(engine, runner, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> int:
    async def everything():
        requests = [
            Request(str(i), prompt, i, Sampling(1.0, n, ()), group=i // GROUP)
            for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return sum(len(done.token_ids) for done in runner.run(everything()))


@torch.inference_mode()
def with_generate(model, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> int:
    """Batches as large as the engine's; a batch goes on until its longest answer is there."""
    for start in range(0, len(prompts), SLOTS):
        ids = torch.tensor(prompts[start : start + SLOTS])
        longest = max(lengths[start : start + SLOTS])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
        )
    return sum(lengths)


def compare(setup, prompts, lengths, least: float, record) -> float:
    """Tokens a CPU second, engine over `generate`: the best round of each."""
    model, engine, runner, _ = setup
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    ratio, deadline = 0.0, time.monotonic() + PATIENCE_S
    while len(rates["engine"]) < ROUNDS or (ratio < least and time.monotonic() < deadline):
        for name, work in (
            ("engine", lambda: with_engine(engine, runner, prompts, lengths)),
            ("generate", lambda: with_generate(model, prompts, lengths)),
        ):
            seconds, tokens = cpu_seconds(work)
            assert tokens == sum(lengths)
            rates[name].append(tokens / seconds)
        best = {name: max(values) for name, values in rates.items()}
        ratio = best["engine"] / best["generate"]
    record("tokens_per_cpu_second", {**best, "ratio": ratio})
    print(f"\nengine {best['engine']:.0f}, generate {best['generate']:.0f} tokens a CPU second: {ratio:.2f} times")
    return ratio


def test_equal_lengths(setup, record_property):
    prompts = [p for p in setup[3][:32] for _ in range(GROUP)]
    assert compare(setup, prompts, [28] * len(prompts), 1.3, record_property) >= 1.3


def test_ragged_lengths(setup, record_property):
    prompts = [p for p in setup[3] for _ in range(GROUP)]
    lengths = ragged_lengths(len(prompts))
    assert (len(lengths), max(lengths)) == (1024, 192)
    assert sum(lengths) / len(lengths) == pytest.approx(33, abs=1.5)
    assert sorted(lengths)[512] == pytest.approx(24, abs=1)
    assert compare(setup, prompts, lengths, 5.0, record_property) >= 5.0
