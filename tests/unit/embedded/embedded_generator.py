"""An embedded engine over a transformers model, and requests for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import small_models

from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.engine import Completion, Request, Sampling

STOP = (3, 4)


class Generator:
    """An awake engine over a transformers model, and a loop to run it on."""

    def __init__(self, model, directory, slots: int, dtype: str = "float32") -> None:
        self.model = model
        overrides = {"model": {"dtype": dtype}, "rollout": {"slots": slots}, "run": {"threads": 2}}
        config = small_models.make_config(directory, **overrides)
        self.engine = EmbeddedEngine(config, directory)
        self.runner = asyncio.Runner()
        self.runner.run(self.engine.start())
        self.push(model)

    def push(self, model, version: int = 1) -> None:
        async def update():
            await self.engine.begin_update(version)
            await self.engine.apply_bucket([(n, p.detach()) for n, p in model.named_parameters()])
            await self.engine.end_update()

        self.runner.run(update())

    def __call__(self, requests: Sequence[Request]) -> list[Completion]:
        async def all_of_them():
            return await asyncio.gather(*(self.engine.generate(r) for r in requests))

        return self.runner.run(all_of_them())


def request(name, prompt, seed=0, max_new=24, temperature=1.0, stop=STOP, sampled=0, **sampling) -> Request:
    return Request(str(name), tuple(prompt), seed, Sampling(temperature, max_new, stop, **sampling), sampled=sampled)
