"""Writes run directories as a run does: through the logs and dumps of the product, from simulated answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocate_grpo.config import Config
from colocate_grpo.config_file import dump_config
from colocate_grpo.evaluation import eval_metrics
from colocate_grpo.observe.environment import environment
from colocate_grpo.observe.events import EventLog
from colocate_grpo.observe.metrics import MetricsLog
from colocate_grpo.rollout.statistics import rollout_metrics
from colocate_grpo.trajectory import Trajectory, Verdict, VersionSpan, write_trajectories

PROMPT = [1, 2, 3, 4]


@dataclass
class RunBuilder:
    """A run of simulated answers; `skill(step)` is the chance of a right one."""

    run_dir: Path
    problems: int = 20
    samples: int = 4
    sets: tuple[str, ...] = ("aime",)
    steps: int = 20
    attempt: int = 1
    protocol: str = "aaaa1111"
    records_parts: bool = True
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        self.write_config()

    def write_config(self, **changes: Any) -> None:
        sets = [{"name": name, "path": f"{name}.jsonl", "samples": self.samples} for name in self.sets]
        values: dict[str, Any] = {
            "run": {"name": self.run_dir.name, "steps": self.steps},
            "model": {"path": "models/tiny"},
            "data": {"train": "train.jsonl"},
            "eval": {"sets": sets, "every": 4, "baseline_repeats": 3},
        }
        dump_config(Config.model_validate({**values, **changes}), self.run_dir / "config.yaml")

    @property
    def metrics(self) -> MetricsLog:
        return MetricsLog(self.run_dir, self.attempt)

    @property
    def events(self) -> EventLog:
        return EventLog(self.run_dir, self.attempt)

    def start(self, kept: int = -1) -> None:
        """Begin an attempt that goes on after step `kept`."""
        self.events.emit(
            "attempt_start",
            command_line="/somewhere/bin/colocate-grpo train config.yaml 'run.name=a b'",
            **environment(),
        )
        self.metrics.append("attempt", kept, {})
        if kept >= 0:
            self.events.emit("resume", step=kept, checkpoint=f"step_{kept:06d}")

    def train(self, step: int, **values: Any) -> None:
        """One step: 4 groups of 4 answers, dumped, and its row."""
        answers = [self.answer(group, i, self.skill(step)) for group in range(4) for i in range(4)]
        write_trajectories(self.run_dir / "rollouts" / f"step_{step}.jsonl.zst", answers)
        noise = self.random.random()
        row = {
            **rollout_metrics(answers),
            "train/loss": 0.01 * noise,
            "train/entropy_loss": 0.4 - 0.004 * step,
            "train/train_rollout_logprob_abs_diff": 0.01 + 0.001 * noise,
            "perf/rollout_time": 20.0 + noise,
            "perf/reward_time": 3.0,
            "perf/actor_train_time": 12.0,
            "perf/update_weights_time": 1.5,
            "perf/sleep_wake_time": 0.8,
            "perf/save_time": 4.0 if step % 4 == 3 else 0.0,
            "perf/step_time": 36.0 + noise + (4.0 if step % 4 == 3 else 0.0),
            "perf/rollout_tokens_per_s": 900.0 + 10 * noise,
            "perf/log_probs_time": 2.0,
            "train/tokens": 18000.0,
            "memory/rollout/allocated_gib": 20.0 + noise,
            "memory/rollout/free_gib": 2.0 + noise,
            "memory/rollout/host_rss_gib": 5.0 + step,
            "memory/train/allocated_gib": 18.0,
            "memory/train/host_rss_gib": 7.0,
            "memory/train/free_gib": 4.0,
            "data/epoch": 0.0,
            "data/next_index": 4.0 * (step + 1),
        }
        self.metrics.append("step", step, {**row, **values})

    def evaluate(self, step: int, baseline: int | None = None) -> None:
        """All sets: dumped, and one row."""
        row: dict[str, Any] = {"perf/eval_time": 9.0}
        which = f"step_{step}" if baseline is None else f"baseline_{baseline}"
        for name in self.sets:
            skill = self.skill(-1 if baseline is not None else step)
            answers = [self.answer(p, i, skill, hard=p % 5) for p in range(self.problems) for i in range(self.samples)]
            write_trajectories(self.run_dir / "rollouts" / f"eval_{name}_{which}.jsonl.zst", answers)
            row |= {**eval_metrics(name, answers), f"protocol/{name}": self.protocol}
            if self.records_parts:
                row[f"protocol_parts/{name}"] = {"samples": self.samples, "temperature": 0.6, "path": f"{name}.jsonl"}
        extra = {"baseline": baseline, "updates": 0} if baseline is not None else {"updates": step + 1}
        self.metrics.append("eval", step, {**row, **extra})
        self.events.emit("eval", step=step)

    def baselines(self, repeats: int = 3) -> None:
        for repeat in range(repeats):
            self.evaluate(0, repeat)

    def skill(self, step: int) -> float:
        return min(0.9, 0.3 + 0.025 * (step + 1))

    def answer(self, group: int, index: int, skill: float, hard: int = 0) -> Trajectory:
        """A simulated answer: harder problems are answered rightly less often, and at greater length."""
        right = self.random.random() < skill * (1 - hard / 6)
        length = self.random.randint(5, 30 + 5 * hard - (10 if right else 0))
        truncated = length > 40
        reason = "truncated" if truncated else "correct" if right else "wrong"
        n = len(PROMPT)
        return Trajectory(
            prompt_id=f"problem-{group}",
            group_id=group,
            sample_index=index,
            seed=index,
            token_ids=[*PROMPT, *[self.random.randint(5, 99) for _ in range(length)]],
            loss_mask=[0] * n + [1] * length,
            rollout_logprobs=[0.0] * n + [-0.5] * length,
            weight_versions=[VersionSpan(n, n + length, 0)],
            status="truncated" if truncated else "completed",
            verdict=Verdict(1.0 if reason == "correct" else 0.0, reason),
            metadata={"repetitive": length > 38},
        )


def eventful_run(run_dir: Path) -> Path:
    """A lost engine, a crash, a rollback, a resume under a changed protocol: 20 steps in 4 attempts."""
    run = RunBuilder(run_dir)
    run.start()
    run.baselines()
    for step in range(10):
        run.train(step, **{"rollout/failed_ratio": 0.0625 if step == 6 else 0.0, "train/skipped": float(step == 2)})
        if step == 6:
            run.events.emit("engine_lost", engine=1, reason="no token for 300 s", requests=12)
            run.events.emit("engine_restarted", engine=1, seconds=41.5)
        if step % 4 == 3:
            run.events.emit("save", step=step, bytes=3 * 2**20)
            run.evaluate(step)
    run.events.emit("attempt_end", outcome="crash", message="rank 3 was killed", step=9)

    run.attempt = 2
    run.start(kept=7)
    for step in range(8, 14):
        run.train(step)
        if step == 11:
            run.evaluate(step)
    run.events.emit("guard", step=13, name="entropy_rise", action="rollback", message="entropy 0.3 to 0.9")
    fields = {"from": 13, "rollback": 1, "reason": "entropy rises"}
    run.metrics.append("rollback", 7, fields)
    run.events.emit("rollback", step=7, by="guard", **fields)
    run.events.emit("attempt_end", outcome="rollback", message="entropy rises", step=13)

    run.attempt = 3
    run.start(kept=7)
    for step in range(8, 12):
        run.train(step)
    run.evaluate(11)
    run.events.emit("save", step=11, bytes=3 * 2**20)
    run.events.emit("stop_requested", reason="SIGTERM")

    run.attempt, run.samples, run.protocol = 4, 8, "bbbb2222"
    run.write_config()
    run.events.emit("config_change", changes={"eval.sets": [[{"samples": 4}], [{"samples": 8}]]})
    run.start(kept=11)
    for step in range(12, 20):
        run.train(step)
        if step % 4 == 3:
            run.evaluate(step)
    run.events.emit("run_end", outcome="finished", message="", step=19)
    return run_dir
