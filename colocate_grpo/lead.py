"""What only global rank 0 has: the engine, the prompts, the reward workers and the run's records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.data import Cursor, eos_ids, load_eval_set, load_prompts, load_tokenizer
from colocate_grpo.evaluation import EvalResult, Evaluator
from colocate_grpo.observe.events import EventLog
from colocate_grpo.observe.metrics import EvalPoint, Kind, MetricsLog, StepView, read_rows, view
from colocate_grpo.observe.state import StateFile
from colocate_grpo.observe.tensorboard import TensorBoardLog
from colocate_grpo.reward.extract import resolve_scope
from colocate_grpo.reward.pool import RewardPool
from colocate_grpo.rollout.engine import RolloutEngine
from colocate_grpo.rollout.sampler import Batch, Sampler
from colocate_grpo.rollout.samples import Progress, SampleRunner
from colocate_grpo.rollout.statistics import rollout_metrics
from colocate_grpo.trajectory import write_trajectories

T = TypeVar("T")
_POLL_S = 0.2


class StopRequested(Exception):
    """Somebody asked the run to stop; not an error."""


class Lead:
    """Built before any process group exists, so that a user's mistake is told at once."""

    def __init__(self, config: Config, run_dir: Path, attempt: int, model_dir: Path) -> None:
        self.config, self.run_dir, self.attempt = config, run_dir, attempt
        self.stop_file = run_dir / "control" / "stop"
        self.tokenizer = load_tokenizer(model_dir)
        self.eos_ids = eos_ids(model_dir, self.tokenizer)
        self.prompts = load_prompts(config.data, self.tokenizer)
        self.evaluators = self._evaluators()
        self.metrics = MetricsLog(run_dir, attempt)
        self.events = EventLog(run_dir, attempt)
        self.store = CheckpointStore.of(config)
        self.on_life: Callable[[], object] = lambda: None
        self.engine: RolloutEngine | None = None
        self.rewards: RewardPool | None = None
        self.sampler: Sampler | None = None
        self.state = StateFile(run_dir, attempt, config.run.steps)
        self.tensorboard = TensorBoardLog(run_dir)
        self.asyncio = asyncio.Runner()

    def start(self, engine: RolloutEngine, salt: int) -> None:
        """Start the reward workers, and the engine on its still empty cards."""
        c = self.config.reward
        options = dict(c.options)
        if c.function == "math_boxed":
            options.setdefault("answer_scope", resolve_scope(c.answer_scope, self.prompts.rows[0].text))
        self.rewards = RewardPool(c.function, options, c.workers, c.timeout_s, c.memory_limit_mb, c.max_chars)
        self.rewards.start()
        self.engine = engine
        self.runner = SampleRunner(engine, self.rewards, self.tokenizer, self._on_progress)
        cursor = Cursor(self.prompts, self.config.run.seed, self.config.data.shuffle)
        self.sampler = Sampler(self.config, cursor, self.runner, self.eos_ids, salt)
        self.call(engine.start())

    def close(self) -> None:
        """End the engine and the reward workers; safe to call at any point."""
        if self.engine:
            self.call(self.engine.stop())
        if self.rewards:
            self.rewards.stop()
        self.asyncio.close()
        self.tensorboard.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine to its end."""
        return self.asyncio.run(work)

    def collect(self, step: int, weight_version: int) -> tuple[Batch, dict[str, float]]:
        """A full batch and its metrics. Raises StopRequested, with the engine idle again."""
        started = time.monotonic()
        assert self.sampler
        self.state.update(step=step, phase="rollout")
        batch = self.call(self._until_stop(self.sampler.collect(step, weight_version, self._on_progress)))
        seconds = time.monotonic() - started
        tokens = sum(t.response_length for t in batch.trajectories)
        metrics = {
            **rollout_metrics(batch.trajectories),
            **batch.counts,
            "perf/rollout_time": seconds,
            "perf/rollout_tokens_per_s": tokens / seconds,
            "data/epoch": float(self.sampler.cursor.epoch),
            "data/next_index": float(self.sampler.cursor.next_index),
            "weight_version": float(weight_version),
        }
        if self.config.run.dump_rollouts:
            write_trajectories(self._dump(f"step_{step}"), batch.trajectories)
        return batch, metrics

    def evaluate(self, round_name: str, dump_suffix: str) -> dict[str, float | str]:
        """All evaluation sets; one row of metrics. `round_name` keys the sampling seeds."""
        started = time.monotonic()
        row: dict[str, float | str] = {}
        for evaluator in self.evaluators:
            self.state.update(phase="eval")
            result: EvalResult = self.call(self._until_stop(evaluator.run(self.runner, round_name, self._on_progress)))
            write_trajectories(self._dump(f"eval_{result.name}_{dump_suffix}"), result.trajectories)
            row |= result.row()
        return {**row, "perf/eval_time": time.monotonic() - started}

    def view(self) -> StepView:
        """What counts so far in metrics.jsonl."""
        return view(read_rows(self.run_dir))

    def resume_at(self, step: int, row: dict[str, Any]) -> None:
        """What came after `step` no longer counts; `row` is that of `step`, should a crash have taken it."""
        missing = step >= 0 and step not in self.view().steps
        self.metrics.append("attempt", step, {})
        self.tensorboard.close()
        self.tensorboard = TensorBoardLog(self.run_dir, kept_step=step)
        if missing:
            self.record("step", step, row)

    def evaluated(self, step: int, baseline: int | None = None) -> list[EvalPoint]:
        """Evaluations, under today's protocols, after `step` (or the given repeat of the untouched model)."""
        protocols = {(e.spec.name, e.protocol()) for e in self.evaluators}
        points = [p for p in self.view().evaluations if p.step == step and p.baseline == baseline]
        return [p for p in points if (p.name, p.protocol) in protocols]

    def record(self, kind: Kind, step: int, values: dict[str, Any]) -> None:
        """A row for metrics.jsonl, and what is derived from it."""
        row = self.metrics.append(kind, step, values)
        self.tensorboard.add(row)
        if kind == "step":
            self.state.update(step=step + 1, phase="idle", last=row)

    def _evaluators(self) -> list[Evaluator]:
        c = self.config
        sets = [(s, load_eval_set(s, c.data, self.tokenizer, self.prompts)) for s in c.eval.sets]
        return [Evaluator(c, s, prompts, self.eos_ids) for s, prompts in sets]

    def _dump(self, name: str) -> Path:
        directory = self.run_dir / "rollouts"
        directory.mkdir(exist_ok=True)
        return directory / f"{name}.jsonl.zst"

    def _on_progress(self, progress: Progress) -> None:
        self.on_life()
        self.state.update_often(
            rollout={"done": progress.done, "total": progress.total, "tokens_per_s": progress.tokens_per_s}
        )

    async def _until_stop(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, abandoned as soon as the stop file appears."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=_POLL_S)
            if self.stop_file.exists() and not task.done():
                task.cancel()
                await asyncio.wait([task])
                assert self.engine
                await self.engine.abort()
                raise StopRequested
        return task.result()
