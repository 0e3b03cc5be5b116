"""What a report makes of a run directory that something has happened to, and of a place that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from colocate_grpo.errors import DataError
from colocate_grpo.observe.events import EventLog, read_events
from colocate_grpo.report.experiment import compose, write_report
from colocate_grpo.report.missing import missing
from colocate_grpo.report.record import load_record
from colocate_grpo.report.reproduce import portable
from colocate_grpo.trajectory import read_trajectories


@pytest.mark.parametrize("config", ["run: [", "- a\n", "\x00", "{}"])
def test_a_damaged_configuration_is_missing(tmp_path, config):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 0, "attempt": 1, "time": 1.0}) + "\n")
    (tmp_path / "config.yaml").write_text(config)
    assert "`config.yaml` is missing or damaged" in write_report(tmp_path).read_text()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train: d}\n")
    for out in (tmp_path / "config.yaml", tmp_path / "config.yaml" / "report"):
        with pytest.raises(DataError) as error:
            write_report(tmp_path, out=out)
        assert str(error.value).startswith(f"{out}: not a directory that can be written (")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            "eval:\n  sets:",
            ["`eval.sets` in `config.yaml` has a value that is none of its own", "`rollout.group_size`"],
        ),
        ("run: {steps: '4'}", ["`run.steps` in `config.yaml` has a value that is none of its own"]),
        ("rollout: 3\nrun: {until: 2026-01-01}", ["`rollout` in `config.yaml` has a value that is none of its own"]),
        ("eval: {sets: [{path: a}]}", ["`eval.sets` in `config.yaml` has a value that is none of its own"]),
        ("model: {path: m}\ndata: {train: d}", ["`config.yaml` is not whole: `run.steps`, `rollout.prompts_per_step`"]),
    ],
)
def test_options_that_are_none_are_left_out_and_named(tmp_path, reference, config, told):
    (tmp_path / "config.yaml").write_text(config)
    text = compose(load_record(tmp_path), reference=reference)
    assert all(line in text for line in told), text.partition("## Headline")[0]


def test_events_that_do_not_say_what_they_are_about_are_damaged_lines(tmp_path):
    log = EventLog(tmp_path, 1)
    log.emit("save", step=3, bytes=5)
    whole = {"kind": "save", "attempt": 1, "time": 1.0}
    rows = [
        whole,
        {**whole, "step": 3, "attempt": "1"},
        {**whole, "step": 3, "time": "now"},
        {**whole, "kind": "config_change"},
    ]
    rows += [{**whole, "kind": "config_change", "changes": c} for c in (None, [], {"run.steps": 3}, {"run.steps": [3]})]
    rows += [{**whole, "kind": "attempt_end", "time": t} for t in (None, float("nan"), 1e300, -1)]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert [event["step"] for event in read_events(tmp_path)] == [3]
    assert [line.split(" is damaged")[0] for line in missing(load_record(tmp_path)) if "is damaged and" in line] == [
        f"`events.jsonl` line {number}" for number in range(2, 2 + len(rows))
    ]


def test_half_a_command_line_is_told_as_it_is():
    assert portable("/a/bin/colocate-grpo train 'run.name=a b'") == "colocate-grpo train 'run.name=a b'"
    assert portable("/a/bin/colocate-grpo train 'run.na") == "/a/bin/colocate-grpo train 'run.na"
    assert portable(" ") == " "


def test_foreign_directories_among_the_checkpoints_are_no_checkpoints(tmp_path):
    for name in ("step_000002", "step_000003_mine", "step_x", "step_4", "old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("{}")
    assert load_record(tmp_path).checkpoint_steps() == [2]


@pytest.mark.parametrize("content", [b"", b"no dump", zstandard.compress(b"[1]"), zstandard.compress(b'{"status": 1}')])
def test_a_damaged_dump_is_one_line(tmp_path, content):
    path = tmp_path / "step_0.jsonl.zst"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        list(read_trajectories(path))
    assert str(error.value).startswith(f"{path}: a damaged dump of rollouts (")


@pytest.fixture
def reference() -> Path:
    return Path(__file__).parents[3] / "reports" / "reference_8x4090.json"
