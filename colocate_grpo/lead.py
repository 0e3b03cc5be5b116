"""What only global rank 0 has: the engine, the prompts, the reward workers and the run's records."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from colocate_grpo.checkpoint.store import CheckpointStore, SaveError
from colocate_grpo.config import Config
from colocate_grpo.data import Cursor, eos_ids, load_eval_set, load_prompts, load_tokenizer
from colocate_grpo.errors import DataError
from colocate_grpo.evaluation import EvalResult, Evaluator
from colocate_grpo.observe.data_facts import data_facts
from colocate_grpo.observe.events import EventLog
from colocate_grpo.observe.guards import Firing, check_rollout, check_step
from colocate_grpo.observe.metrics import EvalPoint, Kind, MetricsLog, StepView, read_rows, view
from colocate_grpo.observe.state import StateFile
from colocate_grpo.observe.tensorboard import TensorBoardLog
from colocate_grpo.plan.disk import checkpoint_bytes
from colocate_grpo.reward.builtin import with_answer_scope
from colocate_grpo.reward.explain import explain_equal_rewards
from colocate_grpo.reward.extract import resolve_scope
from colocate_grpo.reward.pool import RewardPool
from colocate_grpo.rollout.engine import RolloutEngine
from colocate_grpo.rollout.sampler import Batch, Sampler
from colocate_grpo.rollout.samples import Progress, SampleRunner
from colocate_grpo.rollout.statistics import rollout_metrics
from colocate_grpo.train.shape import read_hf_config, validate_model
from colocate_grpo.trajectory import write_trajectories

T = TypeVar("T")
log = logging.getLogger(__name__)
_POLL_S = 0.2

# What rank 0 announces; after a colon comes the reason.
GO, NOTHING, STOP, SKIP, GUARD_STOP, ROLL_BACK = "go", "nothing", "stop", "skip", "guard_stop", "rollback"


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
        self.planned_bytes = checkpoint_bytes(validate_model(config, read_hf_config(model_dir)), config)
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
        scope = resolve_scope(c.answer_scope, self.prompts.rows[0].text)
        options = with_answer_scope(c.function, c.options, scope)
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
        if self.stop_file.exists():
            raise StopRequested
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
        self._warn_of_equal_rewards(step, batch)
        return batch, metrics

    def _warn_of_equal_rewards(self, step: int, batch: Batch) -> None:
        assert self.sampler
        judged = [t for t in batch.trajectories if t.verdict]
        if len({t.score for t in judged}) > 1:
            return
        texts = [self.runner.response_text(t, self.sampler.sampling) for t in judged]
        if why := explain_equal_rewards([t.verdict for t in judged if t.verdict], texts):
            log.warning("step %d: %s", step, why)
            self.events.emit("equal_rewards", step=step, message=why)

    def record(self, kind: Kind, step: int, values: dict[str, Any]) -> None:
        """A row for metrics.jsonl, and what is derived from it."""
        row = self.metrics.append(kind, step, values)
        self.tensorboard.add(row)
        if kind == "step":
            self.state.update(step=step + 1, phase="idle", last=row)

    def evaluate(self, step: int, repeat: int | None) -> None:
        """Evaluate and record what `step` (or this repeat of the untouched model) still lacks."""
        if len(self._evaluated(step, repeat)) < len(self.evaluators):
            where = {"baseline": repeat, "updates": 0} if repeat is not None else {"updates": step + 1}
            name = f"step_{step}" if repeat is None else f"baseline_{repeat}"
            row = self._run_evaluators(name) | where
            self.record("eval", step, row)
            self.events.emit("eval", step=step, **{f"eval/{e.name}": row[f"eval/{e.name}"] for e in self.evaluators})
        if repeat is None and any(c.step == step and c.awaits_evaluation for c in self.store.complete()):
            self.store.mark_evaluated(step, {f"eval/{p.name}": p.accuracy for p in self._evaluated(step, None)})

    def _run_evaluators(self, round_name: str) -> dict[str, Any]:
        """One row for all sets; `round_name` keys the sampling seeds and names the dumps."""
        started = time.monotonic()
        row: dict[str, Any] = {}
        for evaluator in self.evaluators:
            self.state.update(phase="eval")
            work = evaluator.run(self.runner, round_name, self._on_progress)
            result: EvalResult = self.call(self._until_stop(work))
            write_trajectories(self._dump(f"eval_{result.name}_{round_name}"), result.trajectories)
            row |= result.row()
        return {**row, "perf/eval_time": time.monotonic() - started}

    def view(self) -> StepView:
        """What counts so far in metrics.jsonl."""
        return view(read_rows(self.run_dir))

    def newest_checkpoint(self) -> str:
        """Path of the checkpoint to go on from, or NOTHING."""
        checkpoint = self.store.newest()
        if not checkpoint:
            self._resume_at(-1, {})
        return str(checkpoint.path) if checkpoint else NOTHING

    def require_place_in_data(self) -> None:
        """DataError where the newest checkpoint comes from a replay, which draws no prompts."""
        newest = self.store.newest()
        if newest and not json.loads((newest.path / "loop.json").read_text())["sampler"]:
            raise DataError(
                f"{self.run_dir}: {newest.path.name} was trained by --replay and has no place in the order of the "
                "prompts; go on with --replay, or export it and start another run from there (model.path, run.dir)"
            )

    def resume(self, state: dict[str, Any], checkpoint: str) -> None:
        """Take up the order of the data and the records where `state` (loop.json) was saved."""
        if self.sampler and state["sampler"]:
            self.sampler.restore(state["sampler"], {p.id: p for p in self.prompts.rows})
        self._resume_at(state["step"], state["row"])
        self.events.emit("resume", step=state["step"], checkpoint=checkpoint)

    def begin_save(self, step: int) -> str:
        """Path of a temporary directory for all ranks, or NOTHING where there is no room."""
        try:
            return str(self.store.begin(step, None if self.store.newest() else self.planned_bytes))
        except OSError as error:  # the run is worth more than this checkpoint
            return self._save_failed(step, error)

    def publish(self, path: Path, state: dict[str, Any], error: BaseException | None) -> str:
        """Seal what all ranks have written; NOTHING where that failed (`error`: the trainer's own failure)."""
        try:
            if error:
                raise SaveError(str(error))
            (path / "loop.json").write_text(json.dumps(state))
            every = self.config.eval.every
            due = bool(every) and (state["step"] + 1) % every == 0
            checkpoint = self.store.publish(path, {"evaluation_due": due})
        except OSError as failure:  # a full disk, say: told loudly, and the run goes on
            self.store.abandon(path)
            return self._save_failed(state["step"], failure)
        self.events.emit("save", step=state["step"], bytes=checkpoint.size)
        return str(checkpoint.path)

    def judge_rollout(self, step: int, metrics: dict[str, Any]) -> str:
        """What the guards say of a batch."""
        return self._strongest(step, check_rollout(metrics, self.config.guards.rollout))

    def judge_step(self, step: int, row: dict[str, Any], resumed_at: int | None) -> str:
        """What the guards say of an update, before anything is saved."""
        if row.get("train/skipped"):
            grad_norm = row.get("train/grad_norm")
            self.events.emit("update_skipped", step=step, updates=row["train/skipped"], grad_norm=grad_norm)
        history = [row for _, row in sorted(self.view().steps.items())]
        return self._strongest(step, check_step([*history, {**row, "step": step}], self.config.guards.step, resumed_at))

    def _strongest(self, step: int, firings: Sequence[Firing]) -> str:
        """The strongest action of the guards that fired; each is an event."""
        for f in firings:
            self.events.emit("guard", step=step, name=f.name, action=f.action, message=f.message, numbers=f.numbers)
            log.warning("guard %s (%s): %s", f.name, f.action, f.message)
        decisions = {"rollback": ROLL_BACK, "stop": GUARD_STOP, "skip": SKIP}
        for action, decision in decisions.items():
            for f in firings:
                if f.action == action:
                    return f"{decision}:{f.name}: {f.message}"
        return GO

    def _save_failed(self, step: int, error: Exception) -> str:
        log.error("checkpoint of step %d failed, the run goes on without it: %s", step, error)
        self.events.emit("save_failed", step=step, error=str(error))
        return NOTHING

    def _resume_at(self, step: int, row: dict[str, Any]) -> None:
        """What came after `step` no longer counts; `row` is that of `step`, should a crash have taken it."""
        missing = step >= 0 and step not in self.view().steps
        self.metrics.append("attempt", step, data_facts(self.prompts, [e.prompts for e in self.evaluators]))
        self.tensorboard.close()
        self.tensorboard = TensorBoardLog(self.run_dir, kept_step=step)
        if missing:
            self.record("step", step, row)

    def _evaluated(self, step: int, baseline: int | None) -> list[EvalPoint]:
        """Evaluations under today's protocols."""
        protocols = {(e.spec.name, e.protocol().fingerprint) for e in self.evaluators}
        points = [p for p in self.view().evaluations if p.step == step and p.baseline == baseline]
        return [p for p in points if (p.name, p.protocol) in protocols]

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
