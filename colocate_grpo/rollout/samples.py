"""One sample: from a prompt to a graded trajectory, continuing a partial one where there is one."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from colocate_grpo.data import Prompt
from colocate_grpo.reward.pool import RewardPool, RewardTask
from colocate_grpo.rollout.engine import Completion, Request, RequestFailed, RolloutEngine, Sampling
from colocate_grpo.rollout.statistics import is_repetitive
from colocate_grpo.trajectory import Status, Trajectory, VersionSpan


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


def sample_seed(run_seed: int, salt: int, step: int, prompt_id: str, sample_index: int) -> int:
    """63-bit seed of one sample; a rollback changes `salt`, so that it does not replay the same failure."""
    text = f"{run_seed}/{salt}/{step}/{prompt_id}/{sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass
class Progress:
    """Running counts of a rollout or an evaluation, read by the console and state.json."""

    total: int
    done: int = 0
    tokens: int = 0
    reward_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self.started, 1e-9)


def new_trajectory(prompt: Prompt, group_id: int, sample_index: int, seed: int) -> Trajectory:
    """A trajectory of which nothing is sampled yet."""
    n = len(prompt.token_ids)
    return Trajectory(
        prompt_id=prompt.id,
        group_id=group_id,
        sample_index=sample_index,
        seed=seed,
        token_ids=list(prompt.token_ids),
        loss_mask=[0] * n,
        rollout_logprobs=[0.0] * n,
        weight_versions=[],
        status="aborted",
    )


class SampleRunner:
    """Generates and grades single samples; many run concurrently on one event loop."""

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.engine, self.rewards, self.tokenizer, self.on_progress = engine, rewards, tokenizer, on_progress

    async def finish(self, start: Trajectory, prompt: Prompt, sampling: Sampling, progress: Progress) -> Trajectory:
        """Sample what is missing of `start` and grade it.

        Returns an `aborted` trajectory (with what was sampled so far) where the engine was told to abort, and a
        `failed` one where the infrastructure gave the request up. Raises EngineError when no engine is left.
        """
        left = sampling.max_new_tokens - start.response_length
        request = Request(
            request_id=f"{start.group_id}-{start.sample_index}-{len(start.token_ids)}",
            token_ids=tuple(start.token_ids),
            seed=start.seed,
            sampling=Sampling(**{**vars(sampling), "max_new_tokens": left}),
            group=start.group_id,
            sampled=start.response_length,
        )
        try:
            completion = await self.engine.generate(request)
        except RequestFailed as error:  # this sample is lost, the others are not: it leaves its group
            return _failed(start, str(error))
        trajectory = extend(start, completion, sampling)
        progress.tokens += len(completion.token_ids)
        if trajectory.status != "aborted":
            await self._grade(trajectory, prompt, sampling, progress)
            progress.done += 1
        self.on_progress(progress)
        return trajectory

    async def _grade(self, t: Trajectory, prompt: Prompt, sampling: Sampling, progress: Progress) -> None:
        text = self.response_text(t, sampling)
        t.metadata["repetitive"] = is_repetitive(text)
        task = RewardTask(
            response=text,
            gold=prompt.label,
            status=t.status,
            prompt=prompt.text,
            response_tokens=t.response_length,
            max_tokens=sampling.max_new_tokens,
            metadata=prompt.metadata,
        )
        started = time.monotonic()
        t.verdict = await self.rewards.grade(task)
        progress.reward_seconds += time.monotonic() - started

    def response_text(self, t: Trajectory, sampling: Sampling) -> str:
        """The response as text: special tokens kept (`<think>` may be one), only the final EOS cut off."""
        ids = [token for token, sampled in zip(t.token_ids, t.loss_mask, strict=True) if sampled]
        if ids and ids[-1] in sampling.stop_token_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def extend(start: Trajectory, completion: Completion, sampling: Sampling) -> Trajectory:
    """`start` with the sampled tokens of `completion` at its end."""
    n, old = len(completion.token_ids), len(start.token_ids)
    span = [VersionSpan(old, old + n, completion.weight_version)] if n else []
    return Trajectory(
        prompt_id=start.prompt_id,
        group_id=start.group_id,
        sample_index=start.sample_index,
        seed=start.seed,
        token_ids=[*start.token_ids, *completion.token_ids],
        loss_mask=[*start.loss_mask, *[1] * n],
        rollout_logprobs=[*start.rollout_logprobs, *completion.logprobs],
        weight_versions=[*start.weight_versions, *span],
        status=_status(completion),
        metadata=dict(start.metadata),
    )


def _status(completion: Completion) -> Status:
    statuses: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
    return statuses[completion.finish_reason]


def _failed(start: Trajectory, why: str) -> Trajectory:
    metadata: dict[str, Any] = {**start.metadata, "failure": why}
    return Trajectory(**{**vars(start), "status": "failed", "verdict": None, "metadata": metadata})


async def gather_all(tasks: list[asyncio.Task[Trajectory]]) -> list[Trajectory]:
    """All results, or the first exception once every other task is ended: none is left behind."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # cancellation included: children must not outlive their parent
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
