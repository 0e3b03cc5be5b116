"""A guard that rolls the real loop back: what is rewound, what goes on differently, and when the run gives up.

One run for all of it. Its grader fails from step 3 on; with a window of 3 the guard sees that at step 5. Steps 1 and 3
are saved and the one from before the window is step 1, so that steps 2 to 5 are done again. The grader goes on failing
until somebody has mended it and goes back by hand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from loop_runs import TIMEOUT_S, Runner

from colocate_grpo.checkpoint.command import run_rollback
from colocate_grpo.checkpoint.store import CheckpointStore, rollbacks
from colocate_grpo.config_file import load_config
from colocate_grpo.observe.events import read_events
from colocate_grpo.observe.metrics import read_rows, view
from colocate_grpo.rollout.samples import sample_seed
from colocate_grpo.trajectory import Trajectory, read_trajectories

pytestmark = pytest.mark.timeout(2500)  # a limit for hangs: the fixture is a whole run with its rollbacks
NAME, STEPS, FAILS_FROM, FIRES_AT, KEPT = "rolled_back", 7, 3, 5, 1
AGAIN = f"step_{KEPT + 1}.jsonl.zst"
GUARDED = [
    f"run.steps={STEPS}", "rollout.prompts_per_step=4", "checkpoint.every=2", "checkpoint.keep_last=1",
    "eval.at_start=false", "eval.every=4", "eval.sets.0.limit=8", "reward.function=failing_grader:failing",
    "reward.workers=1", "guards.step.window=3", "guards.step.reward_collapse=rollback",
]  # fmt: skip


def overrides(run_dir: Path) -> list[str]:
    return [*GUARDED, f"reward.options={{run_dir: {run_dir}, from_step: {FAILS_FROM}, mended_after: 3}}"]


@pytest.fixture(scope="module")
def dumps(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The whole story; what was sampled first for the step after the one gone back to, and what counts in the end."""
    run_dir, kept = runner.root / NAME, tmp_path_factory.mktemp("dumps")
    process = runner.start(NAME, *overrides(run_dir))
    runner.wait_until(NAME, process, lambda state: state.get("step") == FAILS_FROM)
    first = Path(shutil.copy(run_dir / "rollouts" / AGAIN, kept))
    assert process.wait(timeout=2 * TIMEOUT_S) == 1, runner.log(NAME)
    assert run_rollback(run_dir, KEPT) == 0
    runner.finish(NAME, *overrides(run_dir))
    return [first, run_dir / "rollouts" / AGAIN]


@pytest.fixture
def run_dir(runner: Runner, dumps: list[Path]) -> Path:
    return runner.root / NAME


def events(run_dir: Path, kind: str) -> list[dict]:
    return [event for event in read_events(run_dir) if event["kind"] == kind]


def dumped(path: Path) -> list[Trajectory]:
    return sorted(read_trajectories(path), key=lambda t: (t.group_id, t.sample_index))


def test_it_is_told_with_its_numbers_and_ends_after_two(run_dir: Path, runner: Runner) -> None:
    fired = [event for event in events(run_dir, "guard") if event["name"] == "reward_collapse"]
    assert [(event["step"], event["action"]) for event in fired] == [(FIRES_AT, "rollback")] * 3
    assert all(event["numbers"]["best"] > 0.2 > event["numbers"]["value"] == 0.0 for event in fired)
    assert [(r.came_from, r.to, r.by) for r in rollbacks(run_dir)] == [
        (FIRES_AT, KEPT, "guard"), (FIRES_AT, KEPT, "guard"), (FIRES_AT, KEPT, "user"),
    ]  # fmt: skip
    told = [(event["step"], event["from"], event["rollback"], event["by"]) for event in events(run_dir, "rollback")]
    assert told == [(KEPT, FIRES_AT, number, by) for number, by in ((1, "guard"), (2, "guard"), (3, "user"))]
    given_up, finished = events(run_dir, "run_end")
    assert given_up["outcome"] == "guard_stop"
    assert "it was rolled back 2 times already (guards.max_rollbacks=2)" in given_up["message"]
    assert [event["outcome"] for event in events(run_dir, "attempt_end")] == ["rollback"] * 3 + ["finished"]
    assert [event["step"] for event in events(run_dir, "resume")] == [KEPT] * 3
    assert finished["outcome"] == "finished", runner.log(NAME)


def test_the_metrics_go_back_with_the_checkpoint(run_dir: Path) -> None:
    rows = read_rows(run_dir)
    rewound = [(row["step"], row["from"], row["rollback"]) for row in rows if row["kind"] == "rollback"]
    assert rewound == [(KEPT, FIRES_AT, 1), (KEPT, FIRES_AT, 2), (KEPT, FIRES_AT, 3)]
    counted = view(rows)
    attempts = {step: row["attempt"] for step, row in counted.steps.items()}
    assert attempts == {0: 1, 1: 1, **dict.fromkeys(range(KEPT + 1, STEPS), 4)}
    assert all(row["rollout/raw_reward"] > 0 for row in counted.steps.values())
    assert [removal.steps for removal in counted.removals] == [[2, 3, 4]] * 3, "the step of a firing has no row"
    assert [[(p.step, p.accuracy) for p in removal.evaluations] for removal in counted.removals] == [[(3, 0.0)]] * 3
    assert [(point.step, point.accuracy > 0) for point in counted.evaluations] == [(3, True)]


def test_the_same_prompts_come_again_and_other_samples_of_them(run_dir: Path, dumps: list[Path]) -> None:
    tries = [row for row in read_rows(run_dir) if row["kind"] == "step" and row["step"] == KEPT + 1]
    assert len(tries) == 4
    for metric in ("data/epoch", "data/next_index", "weight_version"):
        assert len({row[metric] for row in tries}) == 1
    for metric in ("rollout/response_len/mean", "train/grad_norm"):
        assert len({row[metric] for row in tries}) == 4, "each try is another one"
    first, last = (dumped(path) for path in dumps)
    assert [(t.prompt_id, t.group_id) for t in first] == [(t.prompt_id, t.group_id) for t in last]
    assert [t.token_ids for t in first] != [t.token_ids for t in last]
    for salt, samples in ((0, first), (3, last)):
        keys = [(f"{t.prompt_id}#{t.group_id}", t.sample_index) for t in samples]
        assert [t.seed for t in samples] == [sample_seed(0, salt, KEPT + 1, *key) for key in keys]
    used = [row["data/next_index"] for row in view(read_rows(run_dir)).steps.values()]
    assert used == [4.0 * (step + 1) for step in range(STEPS)], "no prompt is left out or used twice"


def test_nothing_is_left_of_the_lost_checkpoints(run_dir: Path) -> None:
    store = CheckpointStore.of(load_config(run_dir / "config.yaml"))
    scan = store.scan()
    assert scan.skipped == []
    assert scan.complete[-1].step == STEPS - 1
    assert {c.manifest["rollbacks"] for c in scan.complete if c.step > KEPT} == {3}
