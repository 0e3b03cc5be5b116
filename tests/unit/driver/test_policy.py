"""What the driver decides, apart from the processes it decides about."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from colocate_grpo import best_export, driver, processes
from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.diagnosis import Ending
from colocate_grpo.driver import Deadline, Signals, Supervisor
from colocate_grpo.run_directory import RunDirectory

OPTIONS = {"best_metric": "eval/x", "keep_best": 1, "export_best": True, "min_free_gib": 0.0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


def configured(tmp_path: Path, **sections: Any) -> Config:
    run = {"dir": str(tmp_path / "run"), "steps": 8, "backoff": 1e-3, **sections.pop("run", {})}
    return Config.model_validate({"run": run, "model": {"path": "m"}, "data": {"train": "d.jsonl"}, **sections})


class Scripted(Supervisor):
    """Attempts that end as told, each after saving the step it names; `full`: calls of `_prepare` without room."""

    def __init__(self, config: Config, endings: list[tuple[str, int | None]], full: int = 0) -> None:
        run = RunDirectory(config.run_dir)
        (run.path / "attempts").mkdir(parents=True, exist_ok=True)
        super().__init__(config, run, Signals(), Deadline(config), [], lambda: None)
        self.endings, self.full = endings, full

    def _prepare(self) -> int:
        if self.full:
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super()._prepare()

    def _watch_ranks(self) -> Ending:
        kind, saved = self.endings.pop(0)
        if saved is not None:
            save(self.store, saved)
        return Ending(kind, "because", saved or 0)  # type: ignore[arg-type]


def save(store: CheckpointStore, step: int, score: float | None = None) -> None:
    path = store.begin(step)
    (path / "loop.json").write_text("{}")
    store.publish(path, {})
    if score is not None:
        store.mark_evaluated(step, {"eval/x": score})


def test_an_attempt_that_saved_is_no_failure_whatever_the_limit(tmp_path: Path) -> None:
    config = configured(tmp_path, run={"max_attempts": 1})
    progress = Scripted(config, [("crash", 1), ("crash", 3), ("finished", 7)])
    assert progress._attempts("x").kind == "finished"
    given_up = Scripted(config, [("crash", None)])._attempts("x")
    assert "1 attempt ended without a new checkpoint (run.max_attempts=1)" in given_up.message


def test_a_full_disk_between_attempts_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    config = configured(tmp_path, run={"max_attempts": 3})
    assert Scripted(config, [("crash", 1), ("finished", 7)], full=2)._attempts("x").kind == "finished"
    given_up = Scripted(config, [], full=99)._attempts("x")
    assert (given_up.kind, given_up.exit_code) == ("crash", 1)
    assert "3 attempts in a row" in given_up.message
    assert "the disk is full" in given_up.message


def test_only_the_guards_rollbacks_count_for_their_limit(tmp_path: Path) -> None:
    supervisor = Scripted(configured(tmp_path, guards={"max_rollbacks": 1}), [])
    for _ in range(3):
        supervisor.store.rollback(-1, came_from=3, reason="by hand", by="user")
    fired = Ending("rollback", "entropy rose", 3)
    assert supervisor._roll_back(fired).kind == "rollback"
    assert supervisor._roll_back(fired).kind == "guard_stop"


def test_a_step_of_the_clock_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hours, by_clock = (
        Deadline(configured(tmp_path, run=run)) for run in ({"max_hours": 24}, {"until": "2099-01-01T00:00"})
    )
    now, elapsed = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    assert by_hours.passed() is None
    monkeypatch.setattr(time, "monotonic", lambda: elapsed + 25 * 3600)
    assert by_hours.passed() == "run.max_hours=24.0"
    assert by_clock.passed() is None
    monkeypatch.setattr(time, "time", lambda: now + 100 * 366 * 86400)
    assert by_clock.passed() == "run.until=2099-01-01T00:00"


@pytest.mark.parametrize(("kind", "exported"), [("finished", True), ("stopped", False), ("guard_stop", False)])
def test_the_best_is_exported_when_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, exported: bool
) -> None:
    config = configured(
        tmp_path, checkpoint={**OPTIONS, "every": 1}, eval={"every": 1, "sets": [{"name": "x", "path": "e.jsonl"}]}
    )
    calls: list[object] = []
    monkeypatch.setattr(driver, "export_best", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(processes, "become_subreaper", lambda: None)  # the test's own process must stay as it is
    supervisor = Scripted(config, [(kind, 1)])
    (supervisor.run.path / "logs").mkdir()
    supervisor.run_to_end({}, ["x"])
    assert bool(calls) == exported


def test_a_signal_ends_an_export_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, checkpoint={**OPTIONS, "export_best": False, "keep_best": 0, "best_metric": None})
    store = CheckpointStore(config.run_dir, config.checkpoint.model_copy(update={"best_metric": "eval/x"}))
    save(store, 0, score=0.5)
    (config.run_dir / "logs").mkdir()
    started = config.run_dir / "started"
    monkeypatch.setattr(best_export, "EXPORT", f"open({str(started)!r}, 'w'); import time; time.sleep(600)")
    tag = processes.driver_id(config.run_dir)

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with Signals() as signals:
        threading.Thread(target=interrupt, daemon=True).start()
        begun = time.monotonic()
        assert best_export.export_best(store, tag, lambda: signals.once() is not None) is None
    assert time.monotonic() - begun < 60
    assert processes.find(tag) == []
    assert not (config.run_dir / "hf" / "best").exists()


def test_a_full_disk_during_an_export_costs_the_export_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(
        tmp_path, configured(tmp_path).checkpoint.model_copy(update={"best_metric": "eval/x", "min_free_gib": 0.0})
    )
    save(store, 0, score=0.5)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(
        best_export,
        "EXPORT",
        "import os, sys; out = sys.argv[3]; os.mkdir(out); os.symlink('/dev/full', f'{out}/.checkpoint.json.partial')",
    )
    assert best_export.export_best(store, "a tag", lambda: False) is None
    assert "No space left on device" in caplog.text


def test_what_keeps_no_best_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(
        tmp_path, checkpoint={**OPTIONS, "every": 1, "export_best": False},
        eval={"every": 0, "sets": [{"name": "x", "path": "e.jsonl"}]},
    )  # fmt: skip
    supervisor = Scripted(config, [("finished", 1)])
    supervisor._tell_of_options({})
    assert "with eval.every=0 no checkpoint is evaluated" in caplog.text
