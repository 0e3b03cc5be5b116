"""Several SGLang servers as one engine: balance, failover and restart."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from colocate_grpo.config import Config
from colocate_grpo.rollout.engine import (
    ALL_TAGS,
    Completion,
    EngineError,
    EngineState,
    Request,
    RequestFailed,
    SleepTag,
)
from colocate_grpo.rollout.sglang_options import check_options
from colocate_grpo.rollout.sglang_server import SglangEngine
from colocate_grpo.rollout.sglang_weights import Bucket, ExpectedShards, flatten_bucket
from colocate_grpo.train.parallel import pick_device

log = logging.getLogger(__name__)


class SglangPool:
    """RolloutEngine over `rollout.engines` servers, of which some may be lost for a while.

    A lost engine's requests start anew on another one. Events: `engine_lost`, `engine_restarted`.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        model_dir: Path,
        on_event: Callable[..., Any] = lambda kind, **fields: None,
    ):
        self.config, self.on_event = config, on_event
        key, device = secrets.token_hex(32), pick_device(config).type
        self.engines = [
            SglangEngine(config, run_dir, model_dir, device, index, key) for index in range(config.rollout.engines)
        ]
        self.live: list[SglangEngine] = []
        self.state = EngineState.STOPPED
        self.weight_version = -1
        self._engine_of_group: dict[int, SglangEngine] = {}
        self._aborts = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._last_loss = ""
        self._expected: ExpectedShards | None = None

    async def start(self) -> None:
        """Start all servers at once; EngineError, with nothing left behind, where one does not come up."""
        check_options(self.config.rollout.sglang)
        results = await asyncio.gather(*[e.start() for e in self.engines], return_exceptions=True)
        for error in [r for r in results if isinstance(r, BaseException)]:
            await self.stop()
            raise error
        self.live = list(self.engines)
        self.state = EngineState.AWAKE

    async def stop(self) -> None:
        """End every server; safe at any time."""
        self.state = EngineState.STOPPED
        self.live = []
        await asyncio.gather(*self._ending)
        await asyncio.gather(*[e.stop() for e in self.engines])

    async def health(self) -> bool:
        """Whether every engine that is not known to be lost is healthy, and there is one."""
        return bool(self.live) and all(await asyncio.gather(*[e.health() for e in self.live]))

    # -- generation -------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """On the engine of the request's group, else the least loaded one; moves on when that engine is lost.

        RequestFailed after `rollout.retries` moves, EngineError when no engine is left.
        """
        if self.state is not EngineState.AWAKE or self.weight_version < 0:
            raise EngineError(f"engines are {self.state.value} with weights {self.weight_version}: no generation")
        aborts = self._aborts
        for _ in range(1 + self.config.rollout.retries):
            engine = self._choose(request.group)
            try:
                return await engine.generate(request)
            except RequestFailed:
                raise
            except EngineError as error:
                self._lose(engine, error)
            if self._aborts > aborts:
                return Completion(request.request_id, (), (), "abort", self.weight_version)
        raise RequestFailed(f"{request.request_id} lost {1 + self.config.rollout.retries} engines; {self._last_loss}")

    async def abort(self) -> None:
        """Every running `generate` returns its partial output, an empty one where its engine is lost meanwhile."""
        self._aborts += 1
        await self._each(lambda engine: engine.abort())

    def _choose(self, group: int) -> SglangEngine:
        self._need_one()
        engine = self._engine_of_group.get(group)
        if engine not in self.live:
            engine = self._engine_of_group[group] = min(self.live, key=lambda e: e.load)
        assert engine is not None
        return engine

    # -- sleep, wake and weights ------------------------------------------------------------------------------

    async def sleep(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None:
        self._engine_of_group.clear()
        await self._each(lambda engine: engine.sleep(tags))
        if "weights" in tags:
            self.weight_version = -1  # asked for too early, `generate` is refused: no engine is to blame
        self._take_state()

    async def wake(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None:
        await self._each(lambda engine: engine.wake(tags))
        self._take_state()

    async def begin_update(self, version: int) -> None:
        self.weight_version = -1
        self._expected = self.engines[0].new_expected()
        await self._each(lambda engine: engine.begin_update(version, self._expected))

    async def apply_bucket(self, bucket: Bucket) -> None:
        views = flatten_bucket(bucket)
        if self._expected:
            self._expected.add(views)
        await self._each(lambda engine: engine.load_views(views))

    def cards(self) -> list[str]:
        """UUIDs of the cards of all living engines."""
        return [card for engine in self.live for card in engine.cards()]

    async def apply_handles(self, handles: dict[str, bytes], bucket: Bucket) -> None:
        """As `SglangEngine.apply_handles`, for every engine. Not verified on a GPU."""
        if self._expected:
            self._expected.add(bucket)
        await self._each(lambda engine: engine.load_handles(handles))

    async def end_update(self) -> None:
        await self._each(lambda engine: engine.end_update())
        self.weight_version = self.live[0].weight_version

    async def checksums(self) -> dict[str, str]:
        """By Hugging Face name; where engines differ from what was pushed, the value says which and where."""
        merged: dict[str, str] = {}
        for engine in self.live:
            for name, value in (await engine.checksums()).items():
                if merged.setdefault(name, value) != value:
                    merged[name] = f"{engine.name}: {value}"
        return merged

    # -- loss and restart -------------------------------------------------------------------------------------

    async def restart_lost(self) -> None:
        """Bring lost engines back, asleep. Call it only while all engines and the trainer sleep: SGLang sizes its
        KV cache from the memory that is free at its start. What does not come up stays lost until the next call."""
        await asyncio.gather(*self._ending)
        lost = [e for e in self.engines if e not in self.live]
        assert not lost or self.state is EngineState.ASLEEP, f"engines restart asleep, not {self.state.value}"
        await asyncio.gather(*[self._restart(engine) for engine in lost])

    async def _restart(self, engine: SglangEngine) -> None:
        try:
            await engine.start()
            await engine.sleep()
        except EngineError as error:  # the others carry the run; it is tried again next time
            self._tell_loss(engine, f"restart failed: {error}")
            await engine.stop()
            return
        self.live = [e for e in self.engines if e in self.live or e is engine]
        self.on_event("engine_restarted", engine=engine.index)

    def _lose(self, engine: SglangEngine, error: EngineError) -> None:
        """Take `engine` out and end its server; its other requests fail with that, and move too."""
        if engine not in self.live:
            return
        self.live.remove(engine)
        self._tell_loss(engine, str(error))
        task = asyncio.ensure_future(engine.stop(grace_s=0.0))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _tell_loss(self, engine: SglangEngine, why: str) -> None:
        self._last_loss = why
        log.error("%s", why)
        self.on_event("engine_lost", engine=engine.index, requests=engine.load, message=why.splitlines()[0])

    async def _each(self, call: Callable[[SglangEngine], Awaitable[None]]) -> None:
        """`call` on every live engine at once; who fails is lost. EngineError when none is left."""
        engines = list(self.live)
        results = await asyncio.gather(*[call(e) for e in engines], return_exceptions=True)
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, EngineError):
                self._lose(engine, result)
            elif isinstance(result, BaseException):
                raise result
        self._need_one()

    def _need_one(self) -> None:
        if not self.live:
            raise EngineError(f"all {len(self.engines)} engines are lost; the last one: {self._last_loss}")

    def _take_state(self) -> None:
        states = {engine.state for engine in self.live}
        assert len(states) == 1, f"engines disagree: {states}"
        self.state = states.pop()
