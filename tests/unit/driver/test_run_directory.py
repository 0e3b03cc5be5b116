"""A run's directory as a user names it, and what the commands say of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from colocate_grpo.config import Config
from colocate_grpo.disk_full import DiskFull
from colocate_grpo.driver import supervise
from colocate_grpo.errors import ConfigError
from colocate_grpo.memory.ledger import Ledger
from colocate_grpo.observe.metrics import MetricsLog
from colocate_grpo.observe.state import StateFile
from colocate_grpo.preflight import preflight
from colocate_grpo.run_directory import RunDirectory
from colocate_grpo.status import run_status, take_snapshot


@pytest.fixture
def config(tmp_path):
    return Config.model_validate(
        {"run": {"dir": str(tmp_path / "run"), "steps": 8}, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    )


def elsewhere(config: Config, **run: object) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def test_a_place_that_cannot_be_written_is_one_line(config, tmp_path):
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "run"
    with pytest.raises(ConfigError) as error:
        supervise(elsewhere(config, dir=below), command_line=["train"])
    assert str(error.value) == f"run.dir: {below} cannot be written (Not a directory)"


def test_nothing_to_replay_is_said_before_anything_is_written(config, tmp_path):
    with pytest.raises(ConfigError, match="holds no dumped rollouts"):
        supervise(config, command_line=["train"], replay=tmp_path)
    assert not config.run_dir.exists()


def test_cuda_without_a_device_is_refused_before_the_model_is_fetched(config, monkeypatch):
    monkeypatch.setattr("colocate_grpo.preflight.has_nvidia_card", lambda: False)
    with pytest.raises(ConfigError, match=r"run\.device: cuda, but there is no NVIDIA card here"):
        preflight(elsewhere(config, device="cuda"))


def test_the_last_words_of_an_earlier_attempt_are_no_phase_of_this_one(config):
    run = RunDirectory(config.run_dir)
    with run.locked():
        run.adopt(config)
        run.record_attempt(1, started=0.0)
        StateFile(run.path, 1, 8).update(phase="done")
        assert take_snapshot(run)["phase"] == "done"
        run.record_attempt(2, started=0.0)
        assert take_snapshot(run)["phase"] == "start"


def test_a_run_that_is_not_running_shows_no_progress_of_a_rollout(config, capsys):
    run = RunDirectory(config.run_dir)
    with run.locked():
        run.adopt(config)
        run.record_attempt(1, started=0.0)
        StateFile(run.path, 1, 8).update(phase="rollout", rollout={"done": 1, "total": 2})
        assert take_snapshot(run)["rollout"] == {"done": 1, "total": 2}
        assert run_status(run.path, json_out=False) == 0
        assert re.search(r"attempt +1: running for \d+ h", capsys.readouterr().out)
    assert take_snapshot(run)["rollout"] is None
    assert run_status(run.path, json_out=False) == 0
    assert re.search(r"attempt +1: cut off with its driver *$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("damaged", ["", "{", "[]"])
def test_a_damaged_state_keeps_no_attempt_from_starting(config, damaged):
    config.run_dir.mkdir()
    (config.run_dir / "state.json").write_text(damaged)
    assert StateFile(config.run_dir, 2, 8).values["progress"] == 1


STATE = {"attempt": 1, "step": 3, "steps": 8, "phase": "train", "progress": 9, "time": 1.0, "last": {}}
ODD_STATES = [
    {**STATE, **field}
    for field in (
        {"step": "three"}, {"progress": "much"}, {"time": "noon"}, {"phase": 3}, {"attempt": None},
        {"rollout": [1, 2]}, {"rollout": {"done": "all", "total": 2, "tokens_per_s": 1.0}},
    )
]  # fmt: skip


@pytest.mark.parametrize("state", [[], 7, "text", {}, *ODD_STATES], ids=json.dumps)
def test_a_state_of_another_shape_is_none(config, state, capsys):
    run = RunDirectory(config.run_dir)
    with run.locked():
        run.adopt(config)
        run.record_attempt(1, started=0.0)
        (run.path / "state.json").write_text(json.dumps(state))
        assert run.state() == {}
        for json_out in (True, False):
            assert run_status(run.path, json_out=json_out) == 0
        assert StateFile(run.path, 1, 8).values["progress"] == 1


@pytest.mark.parametrize("odd", ["[]", "7", "", '{"started": "noon"}', '{"ended": [1]}', '{"message": 3}'])
def test_records_of_attempts_and_requests_of_another_shape_stop_nobody(config, odd, capsys):
    run = RunDirectory(config.run_dir)
    with run.locked():
        run.adopt(config)
        for name in ("attempts/1.json", "attempts/1.exit.json", "control/stop"):
            (run.path / name).write_text(odd)
        assert run.attempt(1) == {}
        assert run.exit_report(1) is None
        assert run.stop_reason() == "the file control/stop"
        for json_out in (True, False):
            assert run_status(run.path, json_out=json_out) == 0
        run.record_attempt(1, ended=1.0)
        assert run.attempt(1) == {"ended": 1.0}


def test_rows_that_are_none_break_no_status(config, capsys):
    run = RunDirectory(config.run_dir)
    with run.locked():
        run.adopt(config)
    log = MetricsLog(run.path, 1)
    log.append("step", 0, {"perf/step_time": 1.0, "rollout/raw_reward": "high", "train/grad_norm": None})
    log.append("eval", 0, {"eval/x": 0.5, "protocol/x": "p", "perf/eval_time": "long"})
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run.path / name).open("a") as file:
            file.write(
                '{"kind": "step"}\n{}\n{"step": 1, "attempt": 1, "time": 1.0}\n{"kind": "rollback", "step": 0}\n'
            )
    for json_out in (True, False):
        assert run_status(run.path, json_out=json_out) == 0
    assert "1 of 8 done" in capsys.readouterr().out


def test_memory_of_the_last_step_is_shown_phase_by_phase(config, capsys):
    run, ledger = RunDirectory(config.run_dir), Ledger(torch.device("cpu"))
    with run.locked():
        run.adopt(config)
    for phase in ("rollout", "idle", "train"):
        ledger.enter(phase)
    MetricsLog(run.path, 1).append("step", 0, ledger.metrics())
    assert {phase: set(figures) for phase, figures in take_snapshot(run)["memory"].items()} == {
        phase: {"allocated", "reserved", "free", "host_rss"} for phase in ("rollout", "idle", "train")
    }
    run_status(run.path, json_out=False)
    shown = capsys.readouterr().out
    assert re.search(r"memory +train: allocated \d+\.\d\d GiB, reserved \d+\.\d\d GiB, free", shown)


def test_an_empty_configuration_that_a_power_cut_left_is_written_anew(config):
    run = RunDirectory(config.run_dir)
    with run.locked():
        run.adopt(config)
        (run.path / "config.yaml").write_bytes(b"")
        assert run.adopt(config) == {}
    assert run.config() == config


def test_a_configuration_is_on_the_disk_before_it_has_its_name(config, monkeypatch):
    run, fsync, synced = RunDirectory(config.run_dir), os.fsync, []

    def note(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, path.stat().st_size > 0, (run.path / "config.yaml").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with run.locked():
        run.adopt(config)
    assert synced == [(".config.yaml.partial", True, False), ("run", True, True)]


def test_a_full_disk_at_the_start_is_one_line_and_leaves_nothing_in_the_way(config):
    config.run_dir.mkdir()
    partial = config.run_dir / ".config.yaml.partial"
    partial.symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=rf"^{config.run_dir}.*: No space left on device$") as error:
        supervise(config, command_line=["train"])
    assert error.value.exit_code == 1
    assert not partial.is_symlink()
