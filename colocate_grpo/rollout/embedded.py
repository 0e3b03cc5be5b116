"""The embedded engine: in-process, on CPU, with weights of its own that only a push can fill."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig

from colocate_grpo.config import Config
from colocate_grpo.rollout.embedded_batch import Batch, tile_rows
from colocate_grpo.rollout.embedded_block import Finished
from colocate_grpo.rollout.embedded_model import Decoder
from colocate_grpo.rollout.embedded_weights import EngineWeights, WeightUpdate
from colocate_grpo.rollout.engine import ALL_TAGS, Completion, EngineError, EngineState, Request, SleepTag
from colocate_grpo.train.shape import ModelShape, read_hf_config
from colocate_grpo.weights.hf import tensor_checksum

NO_WEIGHTS = -1


class EmbeddedEngine:
    """See `RolloutEngine`. Decodes in steps on the event loop and lets other coroutines run between them."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self.slots = config.rollout.slots
        self.threads = config.run.threads or len(os.sched_getaffinity(0))  # all cores: the ranks wait meanwhile
        self._workers: ThreadPoolExecutor | None = None
        self.dtype: torch.dtype = getattr(torch, config.rollout.dtype or config.model.dtype)
        self.shape = ModelShape.from_hf(read_hf_config(model_dir))
        self.hf_config = AutoConfig.from_pretrained(model_dir)
        self.state = EngineState.STOPPED
        self.weight_version = NO_WEIGHTS
        self._weights: EngineWeights | None = None
        self._update: WeightUpdate | None = None
        self._batch: Batch | None = None
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self.state is EngineState.STOPPED:
            self.state = EngineState.ASLEEP
            self._workers = _one_thread_each(self.threads) if self.threads > 1 else None
            await self.wake()

    async def generate(self, request: Request) -> Completion:
        self._check_can_generate(request)
        if self._batch is None:
            assert self._weights is not None
            decoder = Decoder(self.shape, self.hf_config, self._weights, tile_rows(self.slots))
            self._batch = Batch(decoder, self.slots, self._workers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._batch.add(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._decode())
        try:
            return await future
        finally:
            if self._waiting.pop(request.request_id, None) and self._batch:  # the caller was cancelled
                self._batch.discard(request)

    async def abort(self) -> None:
        if self._batch is not None:
            self._resolve(self._batch.abort())

    async def sleep(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None:
        if self.state in (EngineState.ASLEEP, EngineState.STOPPED):
            return
        self._check_idle("sleep")
        self._batch = None
        self.state = EngineState.WEIGHTS_ONLY
        if "weights" in tags:  # a cache is worth nothing without the weights it was computed with
            self._weights = self._update = None
            self.weight_version = NO_WEIGHTS
            self.state = EngineState.ASLEEP

    async def wake(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None:
        if self.state is EngineState.STOPPED:
            raise EngineError("the embedded engine is stopped")
        if "weights" in tags and self.state is EngineState.ASLEEP:
            self._weights = EngineWeights(self.shape, self.dtype)
            self.state = EngineState.WEIGHTS_ONLY
        if "kv_cache" in tags:
            if self.state is EngineState.ASLEEP:
                raise EngineError("wake: the KV cache was asked for before the weights")
            self.state = EngineState.AWAKE

    async def begin_update(self, version: int) -> None:
        self._check_idle("begin_update")
        if self._weights is None:
            raise EngineError(f"begin_update: the engine's weights are {self.state.value}")
        if self._update is not None:
            raise EngineError(f"begin_update: update {self._update.version} is not ended")
        self.weight_version = NO_WEIGHTS
        self._batch = None
        self._update = WeightUpdate(self._weights, version)

    async def apply_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._update is None:
            raise EngineError("apply_bucket: no update was begun")
        self._update.apply(bucket)

    async def end_update(self) -> None:
        if self._update is None:
            raise EngineError("end_update: no update was begun")
        update, self._update = self._update, None
        problems = update.finish()
        if problems:
            raise EngineError(f"weight update {update.version}: {'; '.join(problems[:5])} ({len(problems)} in all)")
        self.weight_version = update.version

    async def checksums(self) -> dict[str, str]:
        if self._weights is None:
            raise EngineError("checksums: the engine holds no weights")
        return {name: tensor_checksum(view) for name, view in self._weights.named.items()}

    async def restart_lost(self) -> None:
        """Nothing: the engine is as alive as its process."""

    async def health(self) -> bool:
        return self.state is not EngineState.STOPPED

    async def stop(self) -> None:
        await self.abort()
        if self._workers:
            self._workers.shutdown()
        self._weights = self._update = self._batch = None
        self.weight_version = NO_WEIGHTS
        self.state = EngineState.STOPPED

    def _check_can_generate(self, request: Request) -> None:
        if self.state is not EngineState.AWAKE:
            raise EngineError(f"generate: the engine is {self.state.value}")
        if self.weight_version == NO_WEIGHTS:
            raise EngineError("generate: no weights were pushed since the engine woke up")
        if request.request_id in self._waiting:
            raise EngineError(f"generate: request {request.request_id} is already running")
        longest = len(request.token_ids) + request.sampling.max_new_tokens
        if longest > self.shape.max_positions or request.sampling.max_new_tokens < 1:
            raise EngineError(
                f"generate: {len(request.token_ids)} + {request.sampling.max_new_tokens} tokens do not fit "
                f"the model's {self.shape.max_positions} positions"
            )

    def _check_idle(self, action: str) -> None:
        if self._waiting:
            raise EngineError(f"{action}: {len(self._waiting)} requests are running; abort them first")

    async def _decode(self) -> None:
        """Step the batch until it is empty."""
        try:
            while self._batch:
                with one_torch_thread():
                    ended = self._batch.step()
                self._resolve(ended)
                await asyncio.sleep(0)
        except Exception as error:  # whoever waits must learn of it, whatever it was
            self._fail(error)

    def _resolve(self, ended: Sequence[Finished]) -> None:
        for f in ended:
            completion = Completion(f.request.request_id, f.token_ids, f.logprobs, f.reason, self.weight_version)
            future = self._waiting.pop(f.request.request_id)
            if not future.done():  # cancelled, but its caller has not run yet
                future.set_result(completion)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting, self._batch = self._waiting, {}, None
        for future in waiting.values():
            if not future.done():
                future.set_exception(EngineError(f"the embedded engine failed: {error!r}"))


def _one_thread_each(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "decode", initializer=torch.set_num_threads, initargs=(1,))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Operations of the engine on one thread each, whose results then do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
