"""One attempt at a run, on every rank: the verbs that the loop is written in.

Ranks are SPMD. What rank 0 alone knows (a stop request, a guard, a full disk) it decides alone and announces, so
that all ranks take the same way; while it generates, the others wait on the store and no collective is outstanding.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from colocate_grpo.checkpoint.store import rollbacks
from colocate_grpo.config import Config
from colocate_grpo.lead import GO, GUARD_STOP, NOTHING, ROLL_BACK, SKIP, STOP, Lead, StopRequested
from colocate_grpo.memory.ledger import Ledger
from colocate_grpo.memory.nccl import Communicators
from colocate_grpo.memory.saver import make_saver
from colocate_grpo.plan.assessment import memory_plan
from colocate_grpo.plan.hardware import Assumptions
from colocate_grpo.rollout.engine import RolloutEngine
from colocate_grpo.rollout.statistics import rollout_metrics
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer
from colocate_grpo.trajectory import Trajectory, read_trajectories
from colocate_grpo.weights.push import push, verify

HEARTBEAT = "heartbeat"
EngineFactory = Callable[[Config, Path, Path, Callable[..., object]], RolloutEngine]


class RollBack(Exception):
    """A guard wants the run to go back to an earlier checkpoint."""


class GuardStop(Exception):
    """A guard wants the run to stop."""


class Attempt:
    """Trainer, memory and decisions of one rank; `lead` is there on global rank 0 only."""

    def __init__(self, config: Config, run_dir: Path, model_dir: Path, parallel: Parallel, lead: Lead | None) -> None:
        self.config, self.run_dir, self.model_dir = config, run_dir, model_dir
        self.parallel, self.lead = parallel, lead
        self.ledger = Ledger(parallel.device, config.memory.tolerance_mib * 2**20)
        self.saver = make_saver(config, parallel.device, self.ledger, parallel.rank)
        self.communicators = Communicators(self.ledger)
        self.version = 0
        self.step = 0
        self.row: dict[str, Any] = {}
        self.resume_state: dict[str, Any] | None = None
        self.saved_step = -1
        self._skip = False
        self._guarded_version = -1
        self._has_engines = False
        self.resumed_at: int | None = None
        self._turn = 0
        if lead:
            lead.on_life = lambda: parallel.store.add(HEARTBEAT, 1)

    # -- start ------------------------------------------------------------------------------------------------

    def start(self, make_engine: EngineFactory) -> int:
        """Engines on empty cards, then the trainer, then the first push. Returns the step to begin with."""
        self._start_engines(make_engine)
        self._start_trainer()
        first = self._resume()
        self.sleep_trainer()
        self.push()
        return first

    def start_without_engine(self) -> int:
        """The trainer alone, awake. Returns the step to begin with."""
        self._start_trainer()
        return self._resume()

    def _start_engines(self, make_engine: EngineFactory) -> None:
        self.ledger.enter("engine_start")
        if self.lead:
            engine = make_engine(self.config, self.run_dir, self.model_dir, self.lead.events.emit)
            self.lead.start(engine, salt=len(rollbacks(self.run_dir)))
        self._has_engines = True
        self._note_engines(weights=True, kv_cache=True)
        self.sleep_engines()

    def _start_trainer(self) -> None:
        self.ledger.enter("trainer_start")
        self.trainer = Trainer.build(self.config, self.parallel, self.saver, self.model_dir)
        for memory_class in ("weights", "gradients", "optimizer", "nccl"):
            self.ledger.note(memory_class, True)

    def _resume(self) -> int:
        path = self.agree("resume", lambda: self._lead.newest_checkpoint())
        if path == NOTHING:
            self._remember(step=-1)
            return 0
        state = json.loads((Path(path) / "loop.json").read_text())
        self.trainer.load(Path(path) / "megatron")
        self.version, self.saved_step = state["version"], state["step"]
        if self.lead:
            self.lead.resume(state, Path(path).name)
        self.resumed_at = state["step"] + 1
        self._remember(state["step"])
        return self.resumed_at

    # -- the verbs of the loop --------------------------------------------------------------------------------

    @contextmanager
    def one_step(self, step: int) -> Iterator[None]:
        """Times a step and records its row."""
        started = time.monotonic()
        self.step, self.row = step, {}
        yield
        self.row["perf/step_time"] = time.monotonic() - started
        self.row |= self.ledger.metrics()
        if self.lead:
            self.lead.record("step", step, self.row)

    def rollout(self, step: int) -> list[Trajectory] | None:
        """The batch on rank 0, an empty list elsewhere; None where a guard says to skip it."""
        self.ledger.enter("rollout")
        self.ledger.require()
        batch: list[Trajectory] = []

        def decide() -> str:
            try:
                collected, metrics = self._lead.collect(step, self.version)
            except StopRequested:
                return STOP
            batch.extend(collected.trajectories)
            self.row |= metrics
            return self._lead.judge_rollout(step, metrics)

        self._follow(self.agree(f"rollout/{step}", decide))
        return None if self._skip else batch

    def is_dumped(self, step: int, rollouts: Path) -> bool:
        """False after the last step of an earlier run. Raises StopRequested."""

        def decide() -> str:
            if self._lead.stop_file.exists():
                return STOP
            return GO if _dump(rollouts, step).exists() else NOTHING

        decision = self.agree("dump", decide)
        self._follow(decision)
        return decision != NOTHING

    def dumped_batch(self, step: int, rollouts: Path) -> list[Trajectory] | None:
        """As `rollout`, from the dump of an earlier run."""
        batch: list[Trajectory] = []

        def decide() -> str:
            batch.extend(read_trajectories(_dump(rollouts, step)))
            metrics = rollout_metrics(batch)
            self.row |= metrics
            return self._lead.judge_rollout(step, metrics)

        self._follow(self.agree(f"dump/{step}", decide))
        return None if self._skip else batch

    def sleep_engines(self) -> None:
        """Engines give their cards away; every rank knows when they have."""
        with self.timer("perf/sleep_wake_time"):
            self.agree("engines_asleep", lambda: self._call(lambda e: e.sleep()))
            self._note_engines(weights=False, kv_cache=False)

    def wake_trainer(self) -> None:
        """Optimizer, weights and gradients come back; lost engines are restarted first, on cards still empty."""
        self.ledger.enter("idle")
        if self.parallel.device.type == "cuda":
            self.ledger.compare_asleep(self._planned_asleep())
        self.agree("engines_whole", lambda: self._call(lambda e: e.restart_lost()))
        self.ledger.enter("train")
        with self.timer("perf/sleep_wake_time"):
            self.trainer.wake(("optimizer", "weights", "gradients"))
            self.communicators.resume()

    def sleep_trainer(self) -> None:
        """Everything but the weights, which the push still needs."""
        with self.timer("perf/sleep_wake_time"):
            self.trainer.sleep(("optimizer", "gradients"))

    def update(self, step: int, batch: list[Trajectory] | None) -> None:
        """The GRPO update, its guards, and the new weight version; nothing of it for a batch to be skipped (None)."""
        if batch is None:  # its prompts are used up all the same
            self.row["train/skipped"] = 1.0
            return
        self.ledger.enter("train")
        self.ledger.require()
        self._phase("train")
        with self.timer("perf/actor_train_time"):
            metrics = self.trainer.step(batch if self.lead else None, step)
        self.row |= metrics
        self.version += 1
        self._follow(self.agree(f"step/{step}", lambda: self._lead.judge_step(step, self.row, self.resumed_at)))
        if self._skip:
            self._guarded_version = self.version

    def save_if_due(self, step: int) -> None:
        """A failed save is told and the run goes on."""
        self._remember(step)
        if (step + 1) % self.config.checkpoint.every == 0:
            self.save()

    def save(self) -> None:
        """Checkpoint of the last finished step; the trainer must be awake."""
        assert self.resume_state is not None
        if not self._is_worth_saving:
            return
        self.ledger.enter("save")
        self.ledger.require()
        self._phase("save")
        with self.timer("perf/save_time"):
            self._save(self.resume_state)

    def push(self) -> None:
        """Trainer to engines as one versioned transaction; then the cards belong to the engines."""
        self.ledger.enter("push")
        self._phase("push")
        self.agree("engines_awake", lambda: self._call(lambda e: e.wake(("weights",))))
        self._note_engines(weights=True, kv_cache=False)
        engines = [self.lead.engine] if self.lead and self.lead.engine else []
        stats = self._run(push(self.trainer, engines, self.version, self.config.rollout.bucket_mib))
        self.row |= {"perf/update_weights_time": stats.seconds, "perf/update_weights_gb_per_s": stats.gb_per_s}
        every = self.config.rollout.verify_weights_every
        if every and self.version % every == 0:
            self._run(verify(self.trainer, engines))
        with self.timer("perf/sleep_wake_time"):
            self.trainer.sleep(("weights",))
            self.communicators.suspend()
            self.ledger.enter("rollout")
            self.agree("kv_awake", lambda: self._call(lambda e: e.wake(("kv_cache",))))
        self._note_engines(weights=True, kv_cache=True)

    def evaluate_untouched(self) -> None:
        """Evaluations of the model before any update, as often as `eval.baseline_repeats` says."""
        if not (self.config.eval.at_start and self.config.eval.sets and self.version == 0):
            return
        for repeat in range(self.config.eval.baseline_repeats):
            self._evaluate(0, repeat)

    def evaluate(self, step: int) -> None:
        """Evaluate after `step`; -1 is the untouched model."""
        if step < 0:
            self._evaluate(0, 0)
        else:
            self._evaluate(step, None)

    def evaluate_if_due(self, step: int) -> None:
        """Also makes up for an evaluation that a crash took."""
        if step >= 0 and self.config.eval.every and (step + 1) % self.config.eval.every == 0:
            self._evaluate(step, None)

    def save_from_rollout(self) -> None:
        """Save what is not saved yet while the engines hold the cards: at the end of a run, or of its patience."""
        if not self._is_worth_saving:
            return
        if self._has_engines:
            self.sleep_engines()
            self.wake_trainer()
        self.save()

    def finish(self) -> None:
        """Save the last step, and say that the run went to its end."""
        self.save_from_rollout()
        if self.lead:
            self.lead.state.update(phase="done", step=self.config.run.steps)

    # -- details ----------------------------------------------------------------------------------------------

    def agree(self, topic: str, decide: Callable[[], str | None]) -> str:
        """What rank 0 decides, on all ranks; they wait on the store without an outstanding collective."""
        self._turn += 1
        key = f"{self._turn}/{topic}"
        if not self.lead:
            return self._await(key)
        decision = decide() or GO
        self.parallel.announce(key, decision)
        return decision

    def _await(self, key: str) -> str:
        """Wait for rank 0 as long as it gives signs of life, however long a rollout takes."""
        while True:
            beats = self.parallel.store.add(HEARTBEAT, 0)
            try:
                return self.parallel.wait_for(key, self.config.run.hang_timeout)
            except TimeoutError:  # no answer yet; an end only where rank 0 shows no progress either
                if self.parallel.store.add(HEARTBEAT, 0) == beats:
                    raise

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the seconds inside to the step's row."""
        started = time.monotonic()
        yield
        self.row[name] = self.row.get(name, 0.0) + time.monotonic() - started

    def _evaluate(self, step: int, repeat: int | None) -> None:
        self.ledger.enter("eval")
        self.ledger.require()

        def decide() -> str:
            try:
                self._lead.evaluate(step, repeat)
            except StopRequested:
                return STOP
            return GO

        self._follow(self.agree(f"eval/{step}/{repeat}", decide))

    @property
    def _is_worth_saving(self) -> bool:
        """There is a finished step, it is not saved yet, and no guard said to skip its weights."""
        state = self.resume_state or {"step": -1}
        return state["step"] not in (-1, self.saved_step) and state["version"] != self._guarded_version

    @property
    def _lead(self) -> Lead:
        assert self.lead, "only global rank 0 decides"
        return self.lead

    def _planned_asleep(self) -> int:
        hf = json.loads((self.model_dir / "config.json").read_text())
        return memory_plan(self.config, hf, Assumptions()).asleep

    def _call(self, work: Callable[[RolloutEngine], Any]) -> None:
        assert self._lead.engine
        self._lead.call(work(self._lead.engine))

    def _run(self, work: Any) -> Any:
        return self.lead.call(work) if self.lead else asyncio.run(work)

    def _phase(self, phase: str) -> None:
        if self.lead:
            self.lead.state.update(step=self.step, phase=phase)

    def _note_engines(self, *, weights: bool, kv_cache: bool) -> None:
        self.ledger.note("engine_weights", weights)
        self.ledger.note("kv_cache", kv_cache)

    def _remember(self, step: int) -> None:
        """What a checkpoint must hold to go on exactly from the end of `step`."""
        sampler = self.lead.sampler.state() if self.lead and self.lead.sampler else {}
        row = {k: v for k, v in self.row.items() if not k.startswith("perf/")}
        self.resume_state = {"step": step, "version": self.version, "sampler": sampler, "row": row}

    def _save(self, state: dict[str, Any]) -> None:
        path = self.agree("save", lambda: self._lead.begin_save(state["step"]))
        if path == NOTHING:
            return
        error = self._write_trainer(Path(path) / "megatron")
        published = self.agree("publish", lambda: self._lead.publish(Path(path), state, error))
        if published != NOTHING:
            self.saved_step = state["step"]

    def _write_trainer(self, directory: Path) -> BaseException | None:
        """The error is told by rank 0; torch's checkpoint writer raises on all ranks where it fails on one."""
        try:
            self.trainer.save(directory)
        except (OSError, CheckpointException) as error:
            return error
        return None

    def _follow(self, decision: str) -> None:
        """Take the way that rank 0 announced."""
        what, _, why = decision.partition(":")
        self._skip = what == SKIP
        if what == STOP:
            raise StopRequested
        if what == GUARD_STOP:
            raise GuardStop(why)
        if what == ROLL_BACK:
            raise RollBack(why)


def _dump(rollouts: Path, step: int) -> Path:
    return rollouts / f"step_{step}.jsonl.zst"
