"""Fills a training batch with graded groups: the sampling strategies, on any engine.

Groups are accepted in prompt order, never in order of completion: a short answer is no reason to be trained on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from colocate_grpo.config import Config
from colocate_grpo.data import Cursor, Prompt
from colocate_grpo.rollout.engine import Sampling
from colocate_grpo.rollout.samples import Progress, SampleRunner, gather_all, new_trajectory, sample_seed
from colocate_grpo.rollout.statistics import has_variance
from colocate_grpo.trajectory import Trajectory


@dataclass
class Group:
    """A prompt and its samples; `order` is its place in prompt order."""

    order: int
    prompt: Prompt
    samples: list[Trajectory]

    @property
    def complete(self) -> bool:
        return all(t.status != "aborted" for t in self.samples)

    def to_json(self) -> dict[str, Any]:
        return {"order": self.order, "prompt": self.prompt.id, "samples": [t.to_json() for t in self.samples]}


@dataclass
class Batch:
    """What a rollout gives to the trainer, and the counts of how it came about."""

    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.samples]


class Sampler:
    """Collects batches; its `state()` (next order, unfinished groups) goes into the checkpoint."""

    def __init__(
        self,
        config: Config,
        cursor: Cursor,
        runner: SampleRunner,
        eos_ids: tuple[int, ...],
        salt: int = 0,
    ) -> None:
        self.config, self.cursor, self.runner, self.salt = config, cursor, runner, salt
        r = config.rollout
        self.sampling = Sampling(r.temperature, r.max_new_tokens, eos_ids)
        self.next_order = 0
        self.unfinished: list[Group] = []

    async def collect(
        self, step: int, weight_version: int, on_start: Callable[[Progress], None] = lambda _: None
    ) -> Batch:
        """Rollouts and verdicts until the batch is full (`rollout.prompts_per_step` groups).

        With dynamic sampling, groups without variance are replaced for a bounded number of rounds; what is
        still missing then is filled with them, so that the batch always has its size.
        """
        r = self.config.rollout
        wanted, rounds = r.prompts_per_step, r.dynamic_sampling.max_rounds if r.dynamic_sampling.enabled else 1
        progress = Progress(total=wanted * r.group_size)
        on_start(progress)
        accepted: list[Group] = []
        flat: list[Group] = []
        stale = self._refresh_stale(weight_version)
        for _ in range(rounds):
            for group in await self._round(step, wanted - len(accepted), progress):
                keep = not r.dynamic_sampling.enabled or has_variance(group.samples)
                (accepted if keep else flat).append(group)
            if len(accepted) == wanted:
                break
            progress.total += (wanted - len(accepted)) * r.group_size
        accepted += flat[: wanted - len(accepted)]
        accepted.sort(key=lambda group: group.order)
        dropped = len([g for g in flat if g not in accepted])
        counts = {
            "rollout/groups_dropped": float(dropped),
            "rollout/stale_samples": float(stale),
            "rollout/unfinished_groups": float(len(self.unfinished)),
            "perf/reward_time": progress.reward_seconds,
        }
        return Batch(accepted, counts)

    def state(self) -> dict[str, Any]:
        """JSON state from which `restore` continues the same order."""
        return {
            "next_order": self.next_order,
            "unfinished": [group.to_json() for group in self.unfinished],
            "cursor": self.cursor.state(),
        }

    def restore(self, state: dict[str, Any], prompts: dict[str, Prompt]) -> None:
        """Undo of `state`; `prompts` maps prompt ids to prompts."""
        self.next_order = state["next_order"]
        self.cursor.restore(state["cursor"])
        self.unfinished = [
            Group(g["order"], prompts[g["prompt"]], [Trajectory.from_json(t) for t in g["samples"]])
            for g in state["unfinished"]
        ]

    async def _round(self, step: int, needed: int, progress: Progress) -> list[Group]:
        """Start `needed` groups (more with over-sampling); return the first `needed` in prompt order.

        Over-sampled groups that are not needed, and unfinished ones, go back: as partial samples where
        `rollout.partial` is on, else as prompts to be sampled anew.
        """
        start = self._groups_to_start(step, math.ceil(needed * self.config.rollout.over_sampling))
        done = await self._run(start, needed, progress)
        complete = sorted((g for g in done if g.complete), key=lambda g: g.order)
        chosen = complete[:needed]
        self._hand_back([g for g in done if g not in chosen])
        return chosen

    def _groups_to_start(self, step: int, count: int) -> list[Group]:
        """Unfinished groups of earlier steps first, then fresh prompts."""
        continued, self.unfinished = self.unfinished[:count], self.unfinished[count:]
        fresh = [self._new_group(prompt, step) for prompt in self.cursor.take(count - len(continued))]
        return continued + fresh

    def _new_group(self, prompt: Prompt, step: int) -> Group:
        order = self.next_order
        self.next_order += 1
        seed = self.config.run.seed
        # The order is part of the step's key: a prompt that comes twice in a step is sampled differently.
        samples = [
            new_trajectory(prompt, order, i, sample_seed(seed, self.salt, step, f"{prompt.id}#{order}", i))
            for i in range(self.config.rollout.group_size)
        ]
        return Group(order, prompt, samples)

    async def _run(self, groups: Sequence[Group], needed: int, progress: Progress) -> list[Group]:
        """Run all samples of `groups`; once `needed` groups are complete, abort what still runs."""
        missing = {group.order: sum(t.status == "aborted" for t in group.samples) for group in groups}
        cut = len(groups) <= needed  # nothing is over-sampled: there is no tail to cut

        async def one(group: Group, index: int) -> Trajectory:
            nonlocal cut
            trajectory = await self.runner.finish(group.samples[index], group.prompt, self.sampling, progress)
            group.samples[index] = trajectory
            missing[group.order] -= trajectory.status != "aborted"
            if not cut and sum(n == 0 for n in missing.values()) >= needed:
                cut = True
                await self.runner.engine.abort()
            return trajectory

        await gather_all(
            [
                asyncio.create_task(one(group, index))
                for group in groups
                for index, sample in enumerate(group.samples)
                if sample.status == "aborted"
            ]
        )
        return list(groups)

    def _hand_back(self, groups: list[Group]) -> None:
        if self.config.rollout.partial.enabled:
            self.unfinished = sorted([*self.unfinished, *groups], key=lambda g: g.order)
        elif groups:
            self.cursor.put_back([g.prompt for g in groups])

    def _refresh_stale(self, weight_version: int) -> int:
        """Start samples anew whose oldest token is older than allowed; how many."""
        limit = weight_version - self.config.rollout.partial.max_staleness
        refreshed = 0
        for group in self.unfinished:
            for i, t in enumerate(group.samples):
                if t.weight_versions and min(span.version for span in t.weight_versions) < limit:
                    group.samples[i] = new_trajectory(group.prompt, t.group_id, i, t.seed)
                    refreshed += 1
        return refreshed
