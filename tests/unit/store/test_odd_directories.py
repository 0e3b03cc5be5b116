"""What somebody, or a failing disk, left in the directory of checkpoints: never a crash, never a loss of theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_store import save, steps, store

from colocate_grpo.checkpoint.command import run_list
from colocate_grpo.checkpoint.files import bytes_below, files_below
from colocate_grpo.checkpoint.rollbacks import rollbacks
from colocate_grpo.config import Config
from colocate_grpo.config_file import dump_config
from colocate_grpo.errors import DataError

ODD = ["[]", "7", '"text"', "null", "{", "", '{"eval/x": "high"}', '{"problems": 3}']


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "0.99", True, [1.0]], ids=str)
def test_what_is_no_score_is_never_the_best(tmp_path: Path, score: Any) -> None:
    target = store(tmp_path, keep_last=1, keep_best=1, best_metric="eval/x")
    for step, value in enumerate([score, 0.9, 0.8, 0.7]):
        save(target, step, evaluation_due=True)
        target.mark_evaluated(step, {"eval/x": value})
    best = target.best()
    assert best is not None
    assert best.step == 1
    assert 0 not in steps(target)


def test_what_the_store_did_not_write_is_left_alone(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=1)
    save(target, 0)
    foreign = ["step_000000_mine", "step_1", "step_0000000", ".saving_mine", ".removed_step_000000_mine", "step_٠٠٠٠٠٠"]
    for name in foreign:
        shutil.copytree(target.root / "step_000000", target.root / name)
    archives = ["step_000001.tar", ".saving_step_000001.tar", ".replaced_mine", "notes"]
    for name in archives:
        (target.root / name).touch()
    target.tidy()
    assert target.scan().skipped == []
    for step in (1, 2):
        save(target, step)
        target.tidy()
    left = {path.name for path in target.root.iterdir()}
    assert left == {*foreign, *archives, "step_000001", "step_000002"}, "step 1 is from before the guards' window"


def test_files_and_links_under_the_store_s_own_names_stop_nothing(tmp_path: Path) -> None:
    target, elsewhere = store(tmp_path, window=0, keep_last=1), tmp_path / "other_disk"
    save(target, 0)
    (target.root / "step_000000").rename(elsewhere)
    (target.root / "step_000000").symlink_to(elsewhere)
    for name in ("step_000001", ".saving_step_000002", ".removed_step_000003", ".removed_replaced_step_000004"):
        (target.root / name).touch()
    assert steps(target) == [0]
    target.tidy()
    save(target, 1)
    assert [path.name for path in target.root.iterdir()] == ["step_000001"]
    assert (elsewhere / "loop.json").exists(), "what a link points to is not the store's"


def test_a_flipped_bit_anywhere_in_a_manifest_crashes_nothing(tmp_path: Path) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    path = target.root / "step_000001" / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole) * 8):
        contents = bytearray(whole)
        contents[position // 8] ^= 1 << position % 8
        path.write_bytes(contents)
        scan = target.scan()
        assert [c.step for c in scan.complete] in ([0], [0, 1])
        for checkpoint in scan.complete[1:]:
            target.verify(checkpoint)
            assert checkpoint.size


@pytest.mark.parametrize(
    "fields",
    [{"files": []}, {"files": {"a": 3}}, {"files": {"a": {"size": "3", "sha256": "x"}}}, {"files": {"a": {"size": 3}}},
     {"rollbacks": "0"}, {"rollbacks": -1}, {"rollbacks": None}, {"time": "now"}, {"step": True}],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_another_shape_is_skipped(tmp_path: Path, fields: dict[str, Any]) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    path = target.root / "step_000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    assert steps(target) == [0]
    assert "no readable manifest" in str(target.scan().skipped[0])


@pytest.mark.parametrize("contents", ODD)
@pytest.mark.parametrize("mark", ["evaluation.json", "damaged.json", "pinned.json"])
def test_marks_of_an_odd_shape_crash_nothing(
    tmp_path: Path, mark: str, contents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store(tmp_path, keep_best=1, best_metric="eval/x")
    model, data = {"path": "m"}, {"train": "d"}
    dump_config(Config.model_validate({"model": model, "data": data}), tmp_path / "config.yaml")
    for step in (0, 1):
        save(target, step)
    (target.root / "step_000001" / mark).write_text(contents)
    assert steps(target) == ([0] if mark == "damaged.json" else [0, 1])
    assert target.best() is None
    for json_out in (True, False):
        run_list(tmp_path, verify=False, json_out=json_out)
    assert "step_000000" in capsys.readouterr().out
    save(target, 2)


def test_what_cannot_be_read_now_is_skipped_and_kept(tmp_path: Path) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    manifest = target.root / "step_000001" / "manifest.json"
    manifest.rename(tmp_path / "kept")
    manifest.mkdir()  # the error of a disk that does not answer, as far as a test can have it
    assert "cannot be read" in str(target.scan().skipped[0])
    save(target, 2)
    assert (target.root / "step_000001").exists(), "nobody knows that it is lost"


@pytest.mark.parametrize("contents", ["", "[", "{}", "7", '[{"to": 0}]', '[{"came_from": "1"}]'])
def test_unreadable_rollbacks_are_an_error_and_not_none(tmp_path: Path, contents: str) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    target.rollback(0, came_from=1, reason="test")
    assert steps(target) == [0]
    (tmp_path / "rollbacks.json").write_text(contents)
    with pytest.raises(DataError, match=r"rollbacks\.json: damaged, .*restore it from a copy"):
        steps(target)
    (tmp_path / "rollbacks.json").unlink()
    assert rollbacks(tmp_path) == []


def test_what_vanishes_while_it_is_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    look, seen = Path.is_file, [0]

    def rotated_meanwhile(path: Path) -> bool:
        answer = look(path)
        seen[0] += 1
        if seen[0] == 2:
            shutil.rmtree(target.root / "step_000001")
        return answer

    monkeypatch.setattr(Path, "is_file", rotated_meanwhile)
    assert bytes_below(tmp_path) > 0
    monkeypatch.undo()
    assert {path.parts[-3] for path in files_below(tmp_path) if path.name == "shard_0"} == {"step_000000"}
    assert steps(target) == [0]


def test_a_checkpoint_that_is_rotated_out_during_a_scan_is_not_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = store(tmp_path)
    save(target, 0)
    save(target, 1)
    read = Path.read_bytes

    def removed_first(path: Path) -> bytes:
        if path.name == "manifest.json" and path.parent.name == "step_000000":
            shutil.rmtree(path.parent)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", removed_first)
    scan = target.scan()
    assert [c.step for c in scan.complete] == [1]
    assert scan.skipped == []
