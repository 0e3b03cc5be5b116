"""The contract of a rollout engine. Every engine passes tests/integration/test_engine_contract.py."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

FinishReason = Literal["stop", "length", "abort"]
SleepTag = Literal["weights", "kv_cache"]
ALL_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")


class EngineError(RuntimeError):
    """The infrastructure failed (a dead or hanging engine); never a user's mistake."""


class RequestFailed(EngineError):
    """One request is given up after its retries while other engines live; its sample becomes `failed`."""


@dataclass(frozen=True)
class Sampling:
    """The whole sampling of a request: nothing is left to an engine's defaults.

    top_k = -1 means no limit; `stop_token_ids` holds every EOS id of the model.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """One sample to generate. Requests with the same `group` go to the same engine (prefix cache).

    `token_ids` may already hold a partial answer (partial rollout): its last `sampled` tokens. The engine
    continues it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    group: int = 0
    sampled: int = 0


@dataclass(frozen=True)
class Completion:
    """What an engine sampled: ids (final EOS included), the log-prob of each, and by which weights."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int


class EngineState(enum.Enum):
    STOPPED = "stopped"
    AWAKE = "awake"
    WEIGHTS_ONLY = "weights_only"
    ASLEEP = "asleep"


class RolloutEngine(Protocol):
    """Start, generate, update, sleep and stop. All methods but `generate` are called by one task at a time.

    `generate` may be called many times concurrently and raises EngineError when the engine is lost.
    `sleep` and `wake` are idempotent. A weight update is `begin_update`, any number of `apply_bucket`,
    `end_update`; the version is in force after `end_update`, and generating with another version than
    the last pushed one, or before any push, is an error.
    """

    state: EngineState
    weight_version: int

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> Completion: ...

    async def abort(self) -> None:
        """Make every running `generate` return its partial output with finish reason `abort`."""

    async def sleep(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None: ...

    async def wake(self, tags: Sequence[SleepTag] = ALL_TAGS) -> None: ...

    async def begin_update(self, version: int) -> None: ...

    async def apply_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load (Hugging Face name, full tensor) pairs; the engine must copy what it keeps."""

    async def end_update(self) -> None: ...

    async def checksums(self) -> dict[str, str]:
        """Checksum by Hugging Face name of the weights that the engine really holds."""

    async def restart_lost(self) -> None:
        """Bring lost engines back, asleep; called while the cards are empty. Nothing where none is lost."""

    async def health(self) -> bool: ...

    async def stop(self) -> None: ...
