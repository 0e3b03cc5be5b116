"""Evaluation: n samples a problem, pass@1 with its standard error, and the protocol it was done by."""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from colocate_grpo.config import Config, EvalSet
from colocate_grpo.data import Prompt, PromptSet
from colocate_grpo.rollout.engine import Sampling
from colocate_grpo.rollout.samples import Progress, SampleRunner, gather_all, new_trajectory, sample_seed
from colocate_grpo.rollout.statistics import clustered_error, length_metrics, share
from colocate_grpo.trajectory import Trajectory

MAX_SHOWN = 400


@dataclass(frozen=True)
class Protocol:
    """How an evaluation is done. Rows of different `parts` must not share a curve.

    `described` are in the fingerprint of the data, or do not matter (a path): they say what changed in it.
    """

    parts: dict[str, Any]
    described: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EvalResult:
    """Trajectories in problem order, their metrics, and how they were made."""

    name: str
    trajectories: list[Trajectory]
    metrics: dict[str, float]
    protocol: Protocol

    def row(self) -> dict[str, Any]:
        return {
            **self.metrics,
            f"protocol/{self.name}": self.protocol.fingerprint,
            f"protocol_parts/{self.name}": {**self.protocol.described, **self.protocol.parts},
        }


class Evaluator:
    """One evaluation set under one protocol."""

    def __init__(self, config: Config, spec: EvalSet, prompts: PromptSet, eos_ids: tuple[int, ...]) -> None:
        self.config, self.spec, self.prompts = config, spec, prompts
        limit = spec.max_new_tokens or config.rollout.max_new_tokens
        self.sampling = Sampling(spec.temperature, limit, eos_ids, top_p=spec.top_p)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def total(self) -> int:
        return len(self.prompts.rows) * self.spec.samples

    def protocol(self) -> Protocol:
        c, s = self.config, self.spec
        parts = {
            "data": self.prompts.fingerprint,
            "problems": len(self.prompts.rows),
            "samples": s.samples,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "max_new_tokens": self.sampling.max_new_tokens,
            "reward": [c.reward.function, c.reward.options, c.reward.answer_scope],
            "grader": version("colocate-grpo"),
        }
        described = {
            "path": s.path,
            "system": c.data.system,
            "prompt_suffix": c.data.prompt_suffix,
            "chat_template_kwargs": c.data.chat_template_kwargs,
            "first_prompt": self.prompts.rows[0].text[:MAX_SHOWN] if self.prompts.rows else None,
        }
        return Protocol(parts, described)

    async def run(self, runner: SampleRunner, round_name: str, on_start: Callable[[Progress], None]) -> EvalResult:
        """Sample and grade every problem; `round_name` (for example `baseline 0`) keys the seeds."""
        progress = Progress(total=self.total)
        on_start(progress)
        tasks = [
            asyncio.create_task(
                runner.finish(self._start(order, prompt, i, round_name), prompt, self.sampling, progress)
            )
            for order, prompt in enumerate(self.prompts.rows)
            for i in range(self.spec.samples)
        ]
        trajectories = await gather_all(tasks)
        return EvalResult(self.spec.name, trajectories, eval_metrics(self.spec.name, trajectories), self.protocol())

    def _start(self, order: int, prompt: Prompt, index: int, round_name: str) -> Trajectory:
        key = f"eval/{self.spec.name}/{round_name}/{prompt.id}"
        # Evaluation seeds do not depend on a rollback's salt: the same weights get the same score.
        return new_trajectory(prompt, order, index, sample_seed(self.config.run.seed, 0, 0, key, index))


def eval_metrics(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """pass@1 and its company; excluded samples (no score) are left out of their problem.

    `eval/NAME/reward` is there where the mean of the training reward is not pass@1: a shaped reward.
    """
    problems: dict[int, list[Trajectory]] = {}
    for t in trajectories:
        if t.score is not None:
            problems.setdefault(t.group_id, []).append(t)
    means = [statistics.fmean(float(t.accuracy or 0.0) for t in samples) for samples in problems.values()]
    rewards = [statistics.fmean(float(t.score or 0.0) for t in samples) for samples in problems.values()]
    alive = [t for t in trajectories if t.status != "failed"]
    return {
        f"eval/{name}": statistics.fmean(means) if means else float("nan"),
        **clustered_error(f"eval/{name}", means),
        **({f"eval/{name}/reward": statistics.fmean(rewards)} if rewards != means else {}),
        f"eval/{name}/problems": float(len(means)),
        f"eval/{name}/samples": max((float(len(samples)) for samples in problems.values()), default=0.0),
        f"eval/{name}/failed": float(len(trajectories) - len(alive)),
        f"eval/{name}/no_answer_ratio": share(
            [t.verdict is not None and t.verdict.reason == "no_answer" for t in alive]
        ),
        **length_metrics(alive, f"eval/{name}"),
    }
