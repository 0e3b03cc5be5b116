"""A user's mistakes: one line, exit code 2, nothing written."""

from __future__ import annotations

import json

import pytest
from loop_runs import DEMO

from colocate_grpo.cli import main


@pytest.fixture
def files(tmp_path, runner):
    """Copies of what can be broken."""
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n{"prompt": "1+2?", "lab\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "unlabelled.jsonl").write_text('{"prompt": "1+1?"}\n')
    config = json.loads((runner.demo.model / "config.json").read_text())
    for name, change in {"gpt2": {"model_type": "gpt2"}, "mixtral": {"model_type": "mixtral"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | change))
    return tmp_path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_sise=3", "unknown key (did you mean group_size?)"),
        ("run.steps=many", "run.steps: 'many' is not allowed"),
        ("model.path={files}/nothing", "model.path"),
        ("model.path={files}/gpt2", "gpt2"),
        ("model.path={files}/mixtral", "mixtral"),
        ("data.train={files}/nothing.jsonl", "nothing.jsonl"),
        ("data.train={files}/broken.jsonl", "line 2"),
        ("data.train={files}/empty.jsonl", "empty.jsonl"),
        ("data.train={files}/unlabelled.jsonl", "line 1"),
        ("data.max_prompt_tokens=4", "data.max_prompt_tokens (4)"),
        ("parallel.tp=3", "parallel.tp"),
        ("reward.function=no.such.module:f", "reward.function"),
        ("run.until=tomorrow", "run.until"),
        ("rollout.engine=sglang rollout.tp=3", "rollout.tp: 3 does not divide the model's"),
    ],
)
def test_one_line_and_exit_code_2(runner, files, capsys, monkeypatch, override, expected):
    arguments = [*runner.overrides("refused"), *override.format(files=files).split()]
    monkeypatch.setattr("sys.argv", ["colocate-grpo", "train", str(DEMO), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert expected in lines[0]
    assert not (runner.root / "refused").exists()
