"""A run's directory as a user names it, and what the commands say of it."""

from __future__ import annotations

import re

import pytest

from colocate_grpo.config import Config
from colocate_grpo.driver import supervise
from colocate_grpo.errors import ConfigError
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
