"""A real SGLang server on CPU that logs every scheduler iteration, and its counters for a set of requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import Qwen3Config, Qwen3ForCausalLM

from colocate_grpo.config import Config
from colocate_grpo.plan.rollout import Engine, Job
from colocate_grpo.rollout.sglang_process import ServerProcess

EOS, VOCABULARY = 1, 128
ENGINE = Engine(kv_tokens=2048, max_running=48, chunk=256)
LINE = re.compile(r"(Prefill|Decode) batch(?:.*?#token: (\d+))?")


@dataclass(frozen=True)
class RequestSet:
    """`groups` prompts of `prompt` tokens, `samples` answers each of at most `limit` tokens.

    With `rarely_ends` nearly all answers reach the limit.
    """

    name: str
    groups: int
    samples: int
    prompt: int
    limit: int
    rarely_ends: bool = False


@dataclass(frozen=True)
class Counters:
    """What the server's log says: iterations of each kind, and the most KV tokens in use."""

    prefills: int
    decodes: int
    peak_kv: int
    retracted: bool


def save_model(directory: Path) -> Path:
    """Nearly uniform logits: lengths are geometric with a mean near the vocabulary's size."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=8192, eos_token_id=EOS, bos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def start(directory: Path) -> ServerProcess:
    model = save_model(directory / "model")
    options = {
        "load_format": "auto", "decode_log_interval": 1, "max_total_tokens": ENGINE.kv_tokens,
        "chunked_prefill_size": ENGINE.chunk, "max_running_requests": ENGINE.max_running, "stream_interval": 1,
    }  # fmt: skip
    config = Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "run": {"deterministic": False},  # as on cards: prompts are shared through the prefix cache
            "data": {"train": "unused"},
            "rollout": {"engine": "sglang", "sglang": options},
        }
    )
    server = ServerProcess(config, directory, model, "cpu", 0, "key-of-this-test")
    server.spawn()
    asyncio.run(server.wait_until(lambda: _answers(server), deadline_s=400))
    return server


def measure(server: ServerProcess, wanted: RequestSet) -> tuple[list[Job], Counters]:
    """Run the set; the jobs carry the lengths that really came out."""
    post(server, "/flush_cache?timeout=30", {})
    before = server.log_path.stat().st_size
    prompts = [
        [2 + (group * 7 + i * 3) % (VOCABULARY - 2) for i in range(wanted.prompt)] for group in range(wanted.groups)
    ]
    ids = [prompts[i // wanted.samples] for i in range(wanted.groups * wanted.samples)]
    sampling = {"temperature": 1.0, "max_new_tokens": wanted.limit, "stop_token_ids": [EOS]}
    if wanted.rarely_ends:
        sampling["logit_bias"] = {str(EOS): -8.0}
    answers = post(server, "/generate", {"input_ids": ids, "sampling_params": sampling})
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    jobs = [Job(i // wanted.samples, wanted.prompt, n, wanted.limit) for i, n in enumerate(lengths)]
    return jobs, read_counters(server.log_path.read_bytes()[before:].decode(errors="replace"))


def read_counters(log: str) -> Counters:
    found: Sequence[tuple[str, str]] = LINE.findall(log)
    kinds = [kind for kind, _ in found]
    peak = max(int(tokens) for _, tokens in found if tokens)
    return Counters(kinds.count("Prefill"), kinds.count("Decode"), peak, "Retract requests" in log)


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    with httpx.Client(trust_env=False, timeout=300) as client:
        response = client.post(f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {server.api_key}"})
        response.raise_for_status()
        return response.json() if "json" in response.headers.get("content-type", "") else None


async def _answers(server: ServerProcess) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            return (await client.get(f"{server.url}/health")).status_code == 200
    except httpx.HTTPError:  # not listening yet
        return False
