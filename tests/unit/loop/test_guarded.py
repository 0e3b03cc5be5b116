"""What the loop does with a rollout or a step that a guard refuses: saved, evaluated, replayed, taken up again.

The loop, its decisions, guards and checkpoints are real; the trainer and the engine only keep a list of what they did.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colocate_grpo import attempt as attempt_module
from colocate_grpo import loop
from colocate_grpo.attempt import Attempt, GuardStop
from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.errors import DataError
from colocate_grpo.lead import Lead, StopRequested
from colocate_grpo.memory.ledger import Ledger
from colocate_grpo.observe.events import EventLog, read_events
from colocate_grpo.observe.metrics import MetricsLog, read_rows, view
from colocate_grpo.observe.state import StateFile
from colocate_grpo.rollout.statistics import rollout_metrics
from colocate_grpo.trajectory import Trajectory, Verdict, write_trajectories

STEPS = 4


def batch(spoilt: bool) -> list[Trajectory]:
    return [
        Trajectory(
            prompt_id="p", group_id=0, sample_index=i, seed=0, token_ids=[1, 2], loss_mask=[0, 1],
            rollout_logprobs=[0.0, -1.0], weight_versions=[], status="failed" if spoilt else "completed",
            verdict=None if spoilt else Verdict(float(i), "wrong"),
        )
        for i in range(2)
    ]  # fmt: skip


class ListTrainer:
    """Its weights are the list of the steps that it was trained on."""

    ledger: Ledger

    def __init__(self, lost: set[int]) -> None:
        self.weights: list[int] = []
        self.lost = lost

    def step(self, trajectories: list[Trajectory], step: int) -> dict[str, float]:
        self.weights.append(step)
        lost = step in self.lost
        return {"train/loss": math.nan if lost else 0.1, "train/grad_norm": 1.0, "train/skipped": float(lost)}

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "weights.json").write_text(json.dumps(self.weights))

    def load(self, directory: Path) -> None:
        self.weights = json.loads((directory / "weights.json").read_text())

    def hf_buckets(self, max_bytes: int) -> list[Any]:
        return []

    def sleep(self, tags: tuple[Any, ...]) -> None:
        for tag in tags:
            self.ledger.note(tag, False)

    def wake(self, tags: tuple[Any, ...]) -> None:
        for tag in tags:
            self.ledger.note(tag, True)


class Engine:
    """Keeps the version that it was given last."""

    pushed: list[int]

    def __init__(self) -> None:
        self.pushed = []

    async def begin_update(self, version: int) -> None:
        self.pushed.append(version)

    def __getattr__(self, name: str) -> Any:
        async def nothing(*_: object) -> None: ...

        return nothing


class ScriptedLead(Lead):
    """Rank 0 without model and data: `spoilt` rollouts are failures of the infrastructure."""

    def __init__(self, config: Config, spoilt: set[int]) -> None:
        run_dir = config.run_dir
        self.config, self.run_dir, self.attempt, self.spoilt = config, run_dir, 1, spoilt
        self.stop_file = run_dir / "control" / "stop"
        self.metrics, self.events = MetricsLog(run_dir, 1), EventLog(run_dir, 1)
        self.store, self.planned_bytes = CheckpointStore.of(config), 0
        self.state = StateFile(run_dir, 1, config.run.steps)
        self.tensorboard = SimpleNamespace(add=lambda row: None)
        self.sampler, self.engine, self.evaluated = None, None, []

    def start(self, engine: Any, salt: int) -> None:
        self.engine = engine

    def collect(self, step: int, weight_version: int) -> tuple[Any, dict[str, float]]:
        trajectories = batch(step in self.spoilt)
        return SimpleNamespace(trajectories=trajectories), rollout_metrics(trajectories)

    def call(self, work: Any) -> Any:
        with pytest.raises(StopIteration) as end:
            work.send(None)
        return end.value.value

    def evaluate(self, step: int, repeat: int | None) -> None:
        self.evaluated.append(step)

    def _resume_at(self, step: int, row: dict[str, Any]) -> None: ...


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(lost: set[int] | None = None, spoilt: set[int] | None = None, **guards: Any) -> Attempt:
        config = Config.model_validate(
            {
                "run": {"dir": str(tmp_path / "run"), "steps": STEPS},
                "model": {"path": "m"},
                "data": {"train": "d"},
                "checkpoint": {"every": 2, "keep_last": 9, "min_free_gib": 0},
                "eval": {"every": 2, "at_start": False, "sets": [{"name": "x", "path": "e"}]},
                "guards": {"step": guards},
            }
        )
        config.run_dir.mkdir(exist_ok=True)
        trainer = ListTrainer(lost or set())
        monkeypatch.setattr(attempt_module.Trainer, "build", lambda *_: trainer)
        store = SimpleNamespace(add=lambda *_: 0)
        parallel: Any = SimpleNamespace(
            device=torch.device("cpu"), rank=0, store=store, announce=lambda *_: None, tp_group=None, dp_group=None
        )
        attempt = Attempt(config, config.run_dir, Path("m"), parallel, ScriptedLead(config, spoilt or set()))
        trainer.ledger = attempt.ledger
        return attempt

    return make


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    directory = tmp_path / "dumps"
    directory.mkdir()
    for step in range(STEPS):
        write_trajectories(directory / f"step_{step}.jsonl.zst", batch(spoilt=False))
    return directory


def run(attempt: Attempt) -> Attempt:
    engine: Any = Engine()
    attempt.start = lambda _: Attempt.start(attempt, lambda *_: engine)  # type: ignore[method-assign]
    loop.run(attempt)
    return attempt


def saved(attempt: Attempt) -> dict[int, list[int]]:
    """The weights in each checkpoint."""
    complete = CheckpointStore.of(attempt.config).complete()
    return {c.step: json.loads((c.path / "megatron" / "weights.json").read_text()) for c in complete}


@pytest.mark.parametrize(("lost", "spoilt"), [({3}, set()), ({2}, {3})])
def test_weights_that_a_guard_refused_are_not_saved_at_the_end_either(make, lost: set[int], spoilt: set[int]) -> None:
    """The last step is the refused one, or adds nothing to it."""
    assert saved(run(make(lost, spoilt, non_finite="skip"))) == {1: [0, 1]}


def test_the_step_after_a_refused_one_is_saved(make) -> None:
    assert saved(run(make({1}, non_finite="skip"))) == {3: [0, 1, 2, 3]}


def test_a_spoilt_rollout_keeps_its_save_its_evaluation_and_its_row(make) -> None:
    attempt = run(make(spoilt={1}))
    assert saved(attempt) == {1: [0], 3: [0, 2, 3]}
    assert attempt.lead.evaluated == [1, 3]
    assert attempt.lead.engine.pushed == [0, 1, 1, 2, 3], "the engines are given the same weights again"
    rows = view(read_rows(attempt.run_dir)).steps
    assert [rows[step]["train/skipped"] for step in range(STEPS)] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("action", ["off", "warn"])
def test_an_update_that_was_left_out_is_always_an_event(make, action: str) -> None:
    attempt = run(make({1}, non_finite=action))
    told = [(e["step"], e["updates"]) for e in read_events(attempt.run_dir) if e["kind"] == "update_skipped"]
    assert told == [(1, 1.0)]
    assert sorted(saved(attempt)) == [1, 3]


def test_updates_that_are_left_out_again_and_again_stop_the_run(make) -> None:
    with pytest.raises(GuardStop, match="3 steps in a row"):
        run(make({1, 2, 3}))


def test_a_replay_leaves_out_what_the_guards_leave_out(make, dumps: Path) -> None:
    write_trajectories(dumps / "step_1.jsonl.zst", batch(spoilt=True))
    attempt = make()
    loop.replay(attempt, dumps)
    assert saved(attempt) == {1: [0], 3: [0, 2, 3]}


def test_the_last_dump_ends_a_replay_and_its_step_is_saved(make, dumps: Path) -> None:
    (dumps / "step_3.jsonl.zst").unlink()
    attempt = make()
    loop.replay(attempt, dumps)
    assert saved(attempt) == {1: [0, 1], 2: [0, 1, 2]}
    assert sorted(view(read_rows(attempt.run_dir)).steps) == [0, 1, 2]


def test_a_replay_can_be_stopped(make, dumps: Path) -> None:
    attempt = make()
    attempt.lead.stop_file.parent.mkdir()
    attempt.lead.stop_file.touch()
    with pytest.raises(StopRequested):
        loop.replay(attempt, dumps)


def test_what_a_replay_trained_can_be_evaluated_and_not_gone_on_with(make, dumps: Path) -> None:
    loop.replay(make(), dumps)
    attempt = make()
    with pytest.raises(DataError, match="has no place in the order of the prompts"):
        attempt.lead.require_place_in_data()
    engine: Any = Engine()
    attempt.lead.sampler = SimpleNamespace(state=dict)
    attempt.start(lambda *_: engine)
    attempt.evaluate(STEPS - 1)
    assert attempt.trainer.weights == [0, 1, 2, 3]
    assert attempt.lead.evaluated == [3]
