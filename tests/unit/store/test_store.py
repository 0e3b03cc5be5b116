"""The checkpoint store: what counts, what is kept, and what a kill at any file operation leaves."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate_grpo.checkpoint.store import CheckpointStore, SaveError
from colocate_grpo.config import CheckpointConfig
from colocate_grpo.errors import DataError

FILE_OPERATIONS = {"open", "write", "fsync", "close", "mkdir", "rmdir", "rename", "replace", "unlink", "scandir"}


def store(run_dir: Path, window: int = 1, **options: object) -> CheckpointStore:
    return CheckpointStore(run_dir, CheckpointConfig(min_free_gib=0.0, **options), window)  # type: ignore[arg-type]


def save(target: CheckpointStore, step: int, text: str = "weights", **fields: object) -> None:
    path = target.begin(step)
    (path / "megatron").mkdir()
    with (path / "megatron" / "shard_0").open("wb") as file:
        file.write(text.encode())
        file.write(b"the rest")
    (path / "loop.json").write_text(f'{{"step": {step}}}')
    target.publish(path, fields)


def steps(target: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in target.complete()]


def kill_before_operation(number: int) -> None:
    """SIGKILL this process before its `number`-th file operation (of the calling thread) from now on."""
    seen = 0

    def profile(_frame: object, event: str, function: object) -> None:
        nonlocal seen
        if event == "c_call" and getattr(function, "__name__", "") in FILE_OPERATIONS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def save_in_child_killed_at(number: int, run_dir: Path, **options: object) -> bool:
    """Save step 1 in a forked process killed before its `number`-th file operation; True if it lived to the end."""
    child = os.fork()
    if child == 0:
        kill_before_operation(number)
        save(store(run_dir, **options), 1)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status == 0


@pytest.mark.parametrize("first", [0, 1], ids=["rotates_the_old_one", "replaces_the_same_step"])
def test_a_kill_at_any_file_operation_of_a_save_leaves_one_complete_checkpoint(tmp_path: Path, first: int) -> None:
    kills = 0
    for number in range(1, 1000):
        run_dir = tmp_path / str(number)
        save(store(run_dir), first, "the first")
        finished = save_in_child_killed_at(number, run_dir, keep_last=1)
        survivor = store(run_dir, keep_last=1)
        survivor.tidy()
        newest, skipped = survivor.newest_verified()
        assert newest is not None, f"nothing left after a kill at operation {number}"
        assert skipped == []
        assert newest.step in (first, 1)
        assert not list(survivor.root.glob(".*")), "tidy leaves nothing half-done"
        save(survivor, 2)
        assert steps(survivor)[-1] == 2, "the next save works"
        if finished:
            break
        kills += 1
    assert finished
    assert kills > 25, f"only {kills} operations were interrupted"


def test_begin_publish_and_read_back(tmp_path: Path) -> None:
    target = store(tmp_path)
    save(target, 19, metrics={"rollout/raw_reward": 0.5})
    newest = target.newest()
    assert newest is not None
    assert newest.step == 19
    assert newest.path.name == "step_000019"
    assert newest.manifest["metrics"] == {"rollout/raw_reward": 0.5}
    assert newest.size == len("weights" + "the rest" + '{"step": 19}')
    assert target.verify(newest) == []


def test_a_flipped_bit_is_found_before_loading_and_the_one_before_wins(tmp_path: Path) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    shard = tmp_path / "checkpoints/step_000001/megatron/shard_0"
    contents = bytearray(shard.read_bytes())
    contents[3] ^= 1
    shard.write_bytes(contents)
    newest, skipped = target.newest_verified()
    assert newest is not None
    assert newest.step == 0
    assert "sha256" in str(skipped[0])
    assert "megatron/shard_0" in str(skipped[0])
    assert steps(target) == [0], "a reader that checks sizes alone sees the mark"
    save(target, 1)
    assert steps(target) == [0, 1]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "megatron/shard_0").write_text("short"), "bytes instead of"),
        (lambda path: (path / "megatron/shard_0").unlink(), "missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "no readable manifest"),
        (lambda path: (path / "manifest.json").unlink(), "no readable manifest"),
        (lambda path: (path / "manifest.json").write_text('{"step": 7}'), "no readable manifest"),
    ],
)
def test_an_incomplete_checkpoint_is_skipped_and_named(tmp_path: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    damage(tmp_path / "checkpoints/step_000001")
    scan = target.scan()
    assert [checkpoint.step for checkpoint in scan.complete] == [0]
    assert len(scan.skipped) == 1
    assert "step_000001" in str(scan.skipped[0])
    assert reason in str(scan.skipped[0])
    with pytest.raises(DataError, match=reason):
        target.get(1)


def test_rotation_keeps_last_best_every_pinned_unevaluated_and_one_from_before_the_guard_window(tmp_path: Path) -> None:
    target = store(tmp_path, window=5, keep_last=2, keep_best=1, best_metric="eval/x", keep_every=8)
    for step in range(20):
        save(target, step, evaluation_due=step in (3, 18))
        if step == 3:
            target.mark_evaluated(3, {"eval/x": 0.9})
        if step == 5:
            target.pin(5)
    # 3 best, 5 pinned, 7 and 15 every eighth, 13 before the window, 18 unevaluated and last, 19 last
    assert steps(target) == [3, 5, 7, 13, 15, 18, 19]
    target.mark_evaluated(18, {"eval/x": 0.95})
    assert steps(target) == [5, 7, 13, 15, 18, 19]
    best = target.best()
    assert best is not None
    assert best.step == 18
    target.pin(5, pinned=False)
    assert [checkpoint.step for checkpoint in target.expendable()] == [5]


@given(st.data())
def test_rotation_never_removes_the_newest_and_keeps_a_state_from_before_the_window(data: st.DataObject) -> None:
    window = data.draw(st.integers(0, 6), "window")
    options = data.draw(st.fixed_dictionaries({"keep_last": st.integers(1, 3), "keep_every": st.integers(0, 4)}))
    saved = sorted(data.draw(st.sets(st.integers(0, 12), min_size=1, max_size=6), "steps"))
    with tempfile.TemporaryDirectory() as directory:
        target = store(Path(directory), window, **options)
        for step in saved:
            save(target, step)
        kept = steps(target)
    assert kept[-options["keep_last"] :] == saved[-options["keep_last"] :]
    assert any(step <= saved[-1] - window for step in kept) == any(step <= saved[-1] - window for step in saved)


def test_the_state_from_before_the_window_moves_along(tmp_path: Path) -> None:
    target = store(tmp_path, window=5, keep_last=1)
    for step in range(30):
        save(target, step)
        before = [kept for kept in steps(target) if kept <= step - 5]
        assert step < 5 or step - before[-1] <= 2 * 5
        assert len(steps(target)) <= 3


def test_a_rollback_hides_later_checkpoints_and_the_next_save_gives_them_up(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=5)
    for step in (3, 7, 11):
        save(target, step)
    target.rollback(7, came_from=12, reason="entropy rose", by="guard")
    assert steps(target) == [3, 7]
    [skipped] = target.scan().skipped
    assert skipped.rolled_back
    assert "rolled back (rollback 1 went back to step 7)" in str(skipped)
    assert [(r.came_from, r.to, r.by) for r in target.rollbacks()] == [(12, 7, "guard")]
    assert (target.root / "step_000011").exists(), "kept until something replaces it"
    save(target, 11, "second try")
    assert steps(target) == [3, 7, 11]
    assert target.scan().skipped == []


def test_a_rollback_to_the_beginning_and_targets(tmp_path: Path) -> None:
    target = store(tmp_path, window=10, keep_last=5)
    assert target.rollback_target(7) == -1
    for step in (9, 19, 29):
        save(target, step)
    assert target.rollback_target(29) == 19
    assert target.rollback_target(35) == 19
    assert target.rollback_target(40) == 29
    assert target.rollback_target(12) == 9, "the oldest there is, though within the window"
    target.rollback(-1, came_from=29, reason="collapsed", by="guard")
    assert target.newest() is None
    with pytest.raises(DataError, match=r"no complete checkpoint of step 19 .*rolled back.*complete: none"):
        target.rollback(19, came_from=29, reason="again")


def test_no_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    target = store(tmp_path)
    save(target, 0)
    with pytest.raises(SaveError, match=r"step 1.*GiB too much") as caught:
        target.begin(1, needed_bytes=1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert steps(target) == [0]
    assert not list(target.root.glob(".*"))


def test_room_is_made_from_what_no_run_can_go_back_to_but_not_from_what_is_pinned(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=5)
    for step in (0, 1, 2):
        save(target, step)
    target.pin(1)
    target.rollback(0, came_from=2, reason="test")
    with pytest.raises(SaveError):
        target.begin(1, needed_bytes=1 << 60)
    assert sorted(path.name for path in target.root.iterdir()) == ["step_000000", "step_000001"]
