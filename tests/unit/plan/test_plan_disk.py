"""The planned number of checkpoints against the store's own rotation."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.plan.disk import most_kept


def config(steps: int, window: int, eval_every: int = 0, **checkpoint: Any) -> Config:
    sets = [{"name": "x", "path": "x.jsonl"}] if eval_every else []
    return Config.model_validate(
        {
            "run": {"steps": steps},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "checkpoint": {"min_free_gib": 0.0, "best_metric": "eval/x" if sets else None, **checkpoint},
            "eval": {"every": eval_every, "sets": sets},
            "guards": {"step": {"window": window}},
        }
    )


def most_on_disk(c: Config, saves: dict[int, float]) -> int:
    """Directories of checkpoints while the fullest save is written; `saves` has the evaluation of each step."""
    most = 0
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), c.checkpoint, c.guards.step.window)
        for step, score in saves.items():
            path = store.begin(step)
            (path / "loop.json").write_text(json.dumps({"step": step}))
            most = max(most, len(list(store.root.iterdir())))
            due = bool(c.eval.every) and (step + 1) % c.eval.every == 0
            store.publish(path, {"evaluation_due": due})
            if due:
                store.mark_evaluated(step, {"eval/x": score})
        return max(most, len(list(store.root.iterdir())))


@settings(max_examples=30)
@given(
    saves=st.dictionaries(st.integers(0, 23), st.floats(0, 1), min_size=4, max_size=12),
    window=st.integers(1, 6),
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 2),
    keep_every=st.sampled_from([0, 5, 8]),
    eval_every=st.sampled_from([0, 2, 4]),
)
def test_the_store_never_holds_more(saves: dict[int, float], window: int, eval_every: int, **keep: int) -> None:
    if not eval_every:
        keep["keep_best"] = 0
    c = config(24, window, eval_every, every=1, **keep)
    assert most_on_disk(c, dict(sorted(saves.items()))) <= most_kept(c) + 1


@pytest.mark.parametrize(
    ("window", "keep", "saves"),
    [
        (10, {"keep_last": 1}, [9, 15, 19, 23]),  # 15: stopped and resumed
        (10, {"keep_last": 1, "every": 4}, range(3, 24, 4)),
        (1, {"keep_last": 1}, range(6)),
        (2, {"keep_last": 2}, range(6)),
        (3, {"keep_last": 5}, range(12)),
        (10, {"keep_last": 1, "keep_best": 1, "every": 4, "eval_every": 4}, range(3, 32, 4)),
        (4, {"keep_last": 2, "keep_every": 8}, range(24)),
    ],
)
def test_and_it_holds_as_many(window: int, keep: dict[str, int], saves: Any) -> None:
    """Saves and falling scores with which the plan's number is reached."""
    c = config(max(24, max(saves) + 1), window, **keep)
    assert most_on_disk(c, {step: 1 - step / 100 for step in saves}) == most_kept(c) + 1


def test_keep_last_1_may_hold_three_and_the_first_save_holds_none() -> None:
    assert most_kept(config(100, window=10, keep_last=1)) == 3
    assert most_kept(config(1, window=10, keep_last=1)) == 0
