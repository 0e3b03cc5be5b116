"""The client of one SGLang server: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch

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
from colocate_grpo.rollout.sglang_process import END_GRACE_S, SERVER_KEEP_ALIVE_S, ServerProcess
from colocate_grpo.rollout.sglang_weights import (
    Bucket,
    ExpectedShards,
    ShardLayout,
    as_text,
    flatten_bucket,
    serialize_views,
)

EXCERPT_CHARS = 500
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
LOST = (aiohttp.ClientError, TimeoutError)  # aiohttp lets the time-out of a whole request through as it is
KEEP_ALIVE_S = SERVER_KEEP_ALIVE_S / 2
NO_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10.0)
SERVER_TAGS: dict[SleepTag, list[str]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
STATES: dict[frozenset[SleepTag], EngineState] = {
    frozenset(): EngineState.ASLEEP,
    frozenset({"weights"}): EngineState.WEIGHTS_ONLY,
    frozenset(ALL_TAGS): EngineState.AWAKE,
}


class SglangEngine:
    """RolloutEngine over one server of `rollout.tp` workers.

    A hang is `rollout.token_timeout` without a token of *any* running request: a request may wait in the server's
    queue for as long as others go on.
    """

    def __init__(self, config: Config, run_dir: Path, model_dir: Path, device: str, index: int, api_key: str):
        self.index, self.device = index, device
        self.process = ServerProcess(config, run_dir, model_dir, device, index, api_key)
        self.state = EngineState.STOPPED
        self.weight_version = -1
        self.config = config.rollout
        self._layout = ShardLayout(model_dir, self.config.tp, device)
        self._expected: ExpectedShards | None = None
        self._next_version = -1
        self._running: set[asyncio.Task[Completion]] = set()
        self.last_token = 0.0
        self._accepts = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def load(self) -> int:
        """Requests that run or wait on this engine."""
        return len(self._running)

    async def start(self) -> None:
        """Start the server and wait for it (EngineError with the end of its log); no weights are pushed yet."""
        assert self.state is EngineState.STOPPED, f"{self.name} is already started"
        self.process.spawn()
        self._http = aiohttp.ClientSession(
            base_url=self.process.url,
            headers={"Authorization": f"Bearer {self.process.api_key}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=NO_TIMEOUT,
            trust_env=False,  # a proxy of the user must not see the key
        )
        await self.process.wait_until(self._answers, self.config.start_timeout)
        self.state, self.weight_version = EngineState.AWAKE, -1
        self._accepts.set()

    async def stop(self, grace_s: float = END_GRACE_S) -> None:
        """End the server with everything it started; safe at any time. Running requests fail with EngineError."""
        self.state = EngineState.STOPPED
        self._accepts.set()
        for task in list(self._running):
            task.cancel()
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()
        await asyncio.to_thread(self.process.end, grace_s)

    async def health(self) -> bool:
        """The server process lives and answers. Does not generate: that would touch memory that may be asleep."""
        return self.process.is_alive() and await self._answers()

    # -- generation -------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """EngineError when the engine is lost, asleep or has other weights; RequestFailed when it refuses this one."""
        await self._accepts.wait()
        if self.state is not EngineState.AWAKE:
            raise EngineError(f"{self.name} is {self.state.value}: it does not generate")
        if self.weight_version < 0:
            raise EngineError(f"{self.name} has no pushed weights: it does not generate")
        if not self._running:
            self.last_token = time.monotonic()
        task = asyncio.ensure_future(self._stream(request))
        self._running.add(task)
        try:
            return await self._watch(task)
        finally:
            task.cancel()
            self._running.discard(task)

    async def abort(self) -> None:
        """Every running `generate` returns what it has; those that begin meanwhile wait until that is done."""
        self._accepts.clear()
        try:
            before = set(self._running)
            await self._abort_all()
            while before:
                _, before = await asyncio.wait(before, timeout=0.5)
                if before:  # they were on their way to the server
                    await self._abort_all()
        finally:
            self._accepts.set()

    async def _abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def _watch(self, task: asyncio.Task[Completion]) -> Completion:
        limit = self.config.token_timeout
        while True:
            left = self.last_token + limit - time.monotonic()
            if left <= 0:
                raise EngineError(f"{self.name} hangs: no token for {limit:g} s{self.process.log_tail()}")
            await asyncio.wait([task], timeout=left)
            if task.cancelled():  # by `stop`; to be told from a cancellation of the caller
                raise EngineError(f"{self.name} was stopped")
            if task.done():
                return task.result()

    async def _stream(self, request: Request) -> Completion:
        assert self._http is not None
        token_ids: list[int] = []
        logprobs: list[float] = []
        meta: dict[str, Any] = {}
        try:
            async with self._http.post("/generate", json=_payload(request)) as response:
                if 400 <= response.status < 500:
                    text = excerpt(await response.text(errors="replace"))
                    raise RequestFailed(f"{self.name} refuses {request.request_id}: {text}")
                await self._check(response, "/generate")
                async for chunk in _events(response):
                    self.last_token = time.monotonic()
                    meta = self._meta(chunk, request)
                    token_ids += chunk["output_ids"]
                    logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
        except LOST as error:
            raise self._lost(error) from error
        return self._completion(request, token_ids, logprobs, meta)

    def _meta(self, chunk: dict[str, Any], request: Request) -> dict[str, Any]:
        error = chunk.get("error")
        if error and 400 <= int(error.get("code", 500)) < 500:
            raise RequestFailed(f"{self.name} refuses {request.request_id}: {error['message']}")
        if error:
            raise EngineError(f"{self.name}: {error['message']}")
        return chunk["meta_info"]

    def _completion(
        self, request: Request, token_ids: list[int], logprobs: list[float], meta: dict[str, Any]
    ) -> Completion:
        if not meta.get("finish_reason"):
            raise EngineError(f"{self.name} cut the answer of {request.request_id} off{self.process.log_tail()}")
        if meta["weight_version"] != str(self.weight_version):
            raise EngineError(
                f"{self.name} answers with weights {meta['weight_version']}, expected {self.weight_version}"
            )
        assert len(token_ids) == len(logprobs), f"{len(token_ids)} tokens, {len(logprobs)} log-probs"
        reason = meta["finish_reason"]["type"]
        if reason == "abort" and self._accepts.is_set():
            raise EngineError(f"{self.name} gave {request.request_id} up by itself: {meta['finish_reason']}")
        return Completion(request.request_id, tuple(token_ids), tuple(logprobs), reason, self.weight_version)

    # -- sleep and wake ---------------------------------------------------------------------------------------

    async def sleep(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None:
        """Free the memory of `tags`; nothing may be running. KV cache before weights."""
        resident = self._resident()
        going = [tag for tag in ("kv_cache", "weights") if tag in tags and tag in resident]
        assert not self._running, f"{self.name} is to sleep with {self.load} requests running: abort first"
        if "kv_cache" in going:
            await self._post("/pause_generation", {"mode": "abort"})
            await self._post("/flush_cache?timeout=30", {})
        for tag in going:
            if self.device == "cuda":
                await self._post("/release_memory_occupation", {"tags": SERVER_TAGS[tag]})
            self.state = self._state_of(self._resident() - {tag})
        if "weights" in going:
            self.weight_version = -1

    async def wake(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None:
        """Give `tags` their memory back, weights before KV cache. Weights are undefined until the next update."""
        resident = self._resident()
        for tag in [tag for tag in ALL_TAGS if tag in tags and tag not in resident]:
            if self.device == "cuda":
                await self._post("/resume_memory_occupation", {"tags": SERVER_TAGS[tag]})
            if tag == "kv_cache":
                await self._post("/continue_generation", {"torch_empty_cache": False})
            self.state = self._state_of(self._resident() | {tag})

    def _resident(self) -> frozenset[SleepTag]:
        if self.state is EngineState.STOPPED:
            raise EngineError(f"{self.name} is not running")
        return next(tags for tags, state in STATES.items() if state is self.state)

    def _state_of(self, resident: frozenset[SleepTag]) -> EngineState:
        assert resident in STATES, f"{self.name}: the KV cache cannot be awake without the weights"
        return STATES[resident]

    # -- weights ----------------------------------------------------------------------------------------------

    async def begin_update(self, version: int, expected: ExpectedShards | None = None) -> None:
        """Open the transaction that ends in weights `version`; nothing may be running.

        `expected`: shared with other engines by a caller that fills it itself and uses `load_*`.
        """
        assert "weights" in self._resident(), f"{self.name}: weights are asleep, wake them before an update"
        assert not self._running, f"{self.name} is to be updated with {self.load} requests running"
        self.weight_version, self._next_version = -1, version
        self._expected = expected or self.new_expected()
        await self._post("/begin_weight_update", {})

    def new_expected(self) -> ExpectedShards | None:
        return ExpectedShards(self._layout) if self.config.verify_weights_every else None

    async def apply_bucket(self, bucket: Bucket) -> None:
        views = flatten_bucket(bucket)
        if self._expected:
            self._expected.add(views)
        await self.load_views(views)

    async def apply_handles(self, handles: dict[str, bytes], bucket: Bucket) -> None:
        if self._expected:
            self._expected.add(bucket)
        await self.load_handles(handles)

    async def load_views(self, views: Bucket) -> None:
        """A bucket from `flatten_bucket`, by handle; it may go once this returns."""
        await self._load([serialize_views(views) for _ in range(self.config.tp)])

    async def load_handles(self, handles: dict[str, bytes]) -> None:
        """Each worker opens the handle that lies on its own card (UUID -> handle). Not verified on a GPU."""
        await self._load([handles[card] for card in self.cards()])

    def cards(self) -> list[str]:
        """UUIDs of the cards of this server, in the order of its TP ranks."""
        first = self.index * self.config.tp
        return [str(torch.cuda.get_device_properties(first + rank).uuid) for rank in range(self.config.tp)]

    async def end_update(self) -> None:
        """Close the transaction; answers carry the new version from here on."""
        await self._post("/end_weight_update", {})
        await self._post(
            "/update_weight_version", {"new_version": str(self._next_version), "abort_all_requests": False}
        )
        if self.state is EngineState.AWAKE:  # a sleeping cache was flushed when it went to sleep
            await self._post("/flush_cache?timeout=30", {})
        self.weight_version = self._next_version

    async def checksums(self) -> dict[str, str]:
        """Needs `rollout.verify_weights_every` > 0: only then are the pushed tensors hashed on their way."""
        assert self._expected, "checksums need rollout.verify_weights_every > 0 and a push"
        return self._expected.compare(await self.server_checksums())

    async def server_checksums(self) -> list[dict[str, str]]:
        """The server's own checksums by its own parameter names, one dictionary a TP rank."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in answer["ranks"]]

    async def _load(self, payloads: list[bytes]) -> None:
        await self._post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [as_text(p) for p in payloads], "flush_cache": False},
        )

    # -- HTTP -------------------------------------------------------------------------------------------------

    async def _answers(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get("/health", timeout=HEALTH_TIMEOUT) as response:
                return response.status == 200
        except LOST:  # not listening yet, or gone: that is the answer
            return False

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """A control call. EngineError where the server is gone, refuses, or hangs (`rollout.token_timeout`)."""
        if self._http is None:
            raise EngineError(f"{self.name} is not running")
        limit = aiohttp.ClientTimeout(total=self.config.token_timeout, connect=NO_TIMEOUT.connect)
        try:
            async with self._http.post(path, json=body, timeout=limit) as response:
                await self._check(response, path)
                return await response.json() if response.content_type == "application/json" else None
        except LOST as error:
            raise self._lost(error) from error

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status != 200:
            text = excerpt(await response.text(errors="replace"))
            raise EngineError(f"{self.name} answers {path} with {response.status}: {text}{self.process.log_tail()}")

    def _lost(self, error: Exception) -> EngineError:
        what = f"is lost ({type(error).__name__} {error})"
        if type(error) is TimeoutError:
            what = f"hangs: no answer for {self.config.token_timeout:g} s"
        return EngineError(f"{self.name} {what}{self.process.log_tail()}")


def _payload(request: Request) -> dict[str, Any]:
    """The whole sampling is stated: nothing is left to a server's or a model's defaults."""
    s = request.sampling
    return {
        "input_ids": list(request.token_ids),
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
        "sampling_params": {
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": s.max_new_tokens,
            "min_new_tokens": 0,
            "stop_token_ids": list(s.stop_token_ids),
            # The server stops at the model's own EOS ids besides ours; with none of ours it must stop at nothing.
            "ignore_eos": not s.stop_token_ids,
            "sampling_seed": request.seed,
        },
    }


def excerpt(text: str) -> str:
    """One line of bounded length that says so where it is not the whole text."""
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARS else f"{line[:EXCERPT_CHARS]}... ({len(line)} characters)"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON bodies of a stream of server-sent events, of any length."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[len(b"data: ") :])
