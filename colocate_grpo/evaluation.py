"""Evaluation: n samples a problem, pass@1 with its standard error, and the protocol it was done by."""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from colocate_grpo.config import Config, EvalSet
from colocate_grpo.data import Prompt, PromptSet
from colocate_grpo.rollout.engine import Sampling
from colocate_grpo.rollout.samples import Progress, SampleRunner, gather_all, new_trajectory, sample_seed
from colocate_grpo.rollout.statistics import length_metrics, share
from colocate_grpo.trajectory import Trajectory


@dataclass(frozen=True)
class EvalResult:
    """Trajectories in problem order, their metrics, and the fingerprint of how they were made."""

    name: str
    trajectories: list[Trajectory]
    metrics: dict[str, float]
    protocol: str

    def row(self) -> dict[str, float | str]:
        return {**self.metrics, f"protocol/{self.name}": self.protocol}


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

    def protocol(self) -> str:
        """Fingerprint: rows with different ones must not share a curve."""
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
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

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
    """pass@1 and its company; excluded samples (no score) are left out of their problem."""
    problems: dict[int, list[float]] = {}
    for t in trajectories:
        if t.score is not None:
            problems.setdefault(t.group_id, []).append(float(t.score))
    means = [statistics.fmean(scores) for scores in problems.values()]
    alive = [t for t in trajectories if t.status != "failed"]
    return {
        f"eval/{name}": statistics.fmean(means) if means else float("nan"),
        f"eval/{name}/stderr": clustered_stderr(means),
        f"eval/{name}/problems": float(len(means)),
        f"eval/{name}/samples": max((float(len(scores)) for scores in problems.values()), default=0.0),
        f"eval/{name}/failed": float(len(trajectories) - len(alive)),
        f"eval/{name}/no_answer_ratio": share(
            [t.verdict is not None and t.verdict.reason == "no_answer" for t in alive]
        ),
        **length_metrics(alive, f"eval/{name}"),
    }


def clustered_stderr(problem_means: Sequence[float]) -> float:
    """Standard error of pass@1 over problems: samples of one problem are not independent of each other."""
    n = len(problem_means)
    return statistics.stdev(problem_means) / n**0.5 if n > 1 else 0.0
