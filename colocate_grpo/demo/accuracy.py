"""Accuracy of a model directory on a data file, measured with the product's own engine and grader."""

from __future__ import annotations

import asyncio
from pathlib import Path

from safetensors.torch import load_file

from colocate_grpo.config import Config
from colocate_grpo.data import PromptSet, eos_ids, load_prompts, load_tokenizer
from colocate_grpo.reward.grade import grade_response
from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.engine import Completion, Request, Sampling

MAX_NEW_TOKENS = 48


def measure_accuracy(model_dir: Path, data_file: Path, seed: int, temperature: float = 1.0) -> float:
    """Share of right answers, one sample a problem; fp32 model of one safetensors file."""
    config = Config.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "data": {"train": str(data_file)},
            "run": {"threads": 1},
            "rollout": {"slots": 256},
        }
    )
    tokenizer = load_tokenizer(model_dir)
    prompts = load_prompts(config.data, tokenizer)
    sampling = Sampling(temperature, MAX_NEW_TOKENS, eos_ids(model_dir, tokenizer))
    completions = asyncio.run(_generate(config, model_dir, prompts, sampling, seed))
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    verdicts = [
        grade_response(text, prompt.label, answer_scope="after_think")
        for text, prompt in zip(texts, prompts.rows, strict=True)
    ]
    return sum(v.score or 0.0 for v in verdicts) / len(verdicts)


async def _generate(
    config: Config, model_dir: Path, prompts: PromptSet, sampling: Sampling, seed: int
) -> list[Completion]:
    engine = EmbeddedEngine(config, model_dir)
    await engine.start()
    await engine.begin_update(0)
    await engine.apply_bucket(list(load_file(model_dir / "model.safetensors").items()))
    await engine.end_update()
    requests = [Request(p.id, p.token_ids, seed + i, sampling) for i, p in enumerate(prompts.rows)]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    await engine.stop()
    return completions
