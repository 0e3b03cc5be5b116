"""A pool of real servers over a tiny model, and requests for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import sglang_tiny_model as tiny_model

from colocate_grpo import processes
from colocate_grpo.config import Config
from colocate_grpo.rollout.engine import Request, Sampling
from colocate_grpo.rollout.sglang_pool import SglangPool
from colocate_grpo.weights.push import push

TOKEN_TIMEOUT_S = 30.0
STRANGERS = {"RANK": "0", "TMS_INIT_ENABLE": "1", "OMP_PROC_BIND": "true", "PYTORCH_CUDA_ALLOC_CONF": "x",
             "TORCHELASTIC_RUN_ID": "x", "SECRET_OF_THE_USER": "x"}  # fmt: skip


def config(model_dir: Path, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "data": {"train": "unused", "max_prompt_tokens": 64},
            "rollout": {
                "engine": "sglang",
                "max_new_tokens": 192,
                "verify_weights_every": 1,
                "token_timeout": TOKEN_TIMEOUT_S,
                **rollout,
            },
        }
    )


class Pool:
    """A started pool with its event loop, its events, and the shortest way to a push."""

    def __init__(self, directory: Path, **rollout: Any):
        self.directory = directory
        self.events: list[dict[str, Any]] = []
        self.runner = asyncio.Runner()
        self.model_dir = tiny_model.save(directory / "model")
        self.config = config(self.model_dir, **rollout)
        self.pool = SglangPool(self.config, directory, self.model_dir, self._on_event)
        self.model = tiny_model.build(0)

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def processes(self) -> list[psutil.Process]:
        """What the engines started and what still lives of it."""
        return [p for engine in self.pool.engines for p in processes.find(engine.process.tag)]

    def push(self, version: int) -> None:
        """As in the loop: sleep, wake for the update, push weights that depend on the version, wake the rest."""
        self.model = tiny_model.build(version)
        self.run(self._push(version))

    async def _push(self, version: int) -> None:
        await self.pool.sleep()
        await self.pool.restart_lost()
        await self.pool.wake(("weights",))
        await push(tiny_model.Source(self.model), [self.pool], version, bucket_mib=1)
        await self.pool.wake(("kv_cache",))

    def generate(self, requests: list[Request]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*[self.pool.generate(r) for r in requests])

        return self.run(all_of_them())

    def _on_event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def request(index: int, new_tokens: int, temperature: float = 1.0, group: int | None = None) -> Request:
    """Request `index`: its own prompt, seed and group."""
    prompt = tuple(2 + (index * 37 + i * 11) % (tiny_model.VOCABULARY - 2) for i in range(8 + index % 5))
    sampling = Sampling(temperature, new_tokens, (tiny_model.EOS,))
    return Request(f"r{index}", prompt, 1000 + index, sampling, index if group is None else group)
