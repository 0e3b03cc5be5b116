"""`data check` on real and on broken files."""

from __future__ import annotations

import pytest

from colocate_grpo.data_check import run_data_check
from colocate_grpo.errors import ConfigError, DataError


def test_a_good_file(write, tokenizer, tmp_path, capsys, settings):
    tokenizer.save_pretrained(tmp_path / "model")
    path = write(
        {"prompt": "one \\boxed{}", "label": 1},
        {"prompt": "one \\boxed{}", "label": 1},
        {"prompt": "two \\boxed{}", "label": "\\pi"},
    )
    assert run_data_check(path, tokenizer=str(tmp_path / "model")) == 0
    out = capsys.readouterr().out
    assert "unique prompts  2 (1 duplicates)" in out
    assert "integer 2, text 1" in out
    assert "<|im_start|>user\none \\boxed{}<|im_end|>\n<|im_start|>assistant" in out
    assert "prompt, tokens: min" in out
    assert "warning" not in out


def test_everything_that_is_wrong_is_said(write, capsys):
    path = write(
        {"prompt": "a", "label": 1},
        b"{broken",
        {"prompt": "a", "label": 2},
        {"prompt": "b"},
        {"prompt": "c", "label": 3},
    )
    assert run_data_check(path) == 2
    out = capsys.readouterr().out
    assert "2 broken lines: line 2: not JSON" in out
    assert "line 4: no label" in out
    assert "1 prompts have more than one label" in out
    assert "3 of 3 prompts ask neither for a \\boxed{} nor for `Answer:`" in out


def test_too_long_prompts_follow_the_policy(write, tokenizer, tmp_path, capsys, settings):
    tokenizer.save_pretrained(tmp_path / "model")
    path = write({"prompt": "x" * 100, "label": 1}, {"prompt": "y", "label": 1})
    refused, dropped = (
        settings(path, max_prompt_tokens=50),
        settings(path, max_prompt_tokens=50, overlong_prompts="drop"),
    )
    assert run_data_check(path, str(tmp_path / "model"), refused) == 2
    assert run_data_check(path, str(tmp_path / "model"), dropped) == 0
    assert "1 prompts are longer than data.max_prompt_tokens=50 (first: line 1)" in capsys.readouterr().out


def test_only_broken_rows(write, capsys):
    assert run_data_check(write(b"?")) == 2
    assert "no usable row" in capsys.readouterr().out


def test_a_prompt_that_fills_the_screen_is_cut(write, capsys):
    assert run_data_check(write({"prompt": "x" * 3_000_000, "label": 1})) == 0
    out = capsys.readouterr().out
    assert len(out) < 30_000
    assert "max 3000000" in out
    assert "... [2,980,007 more characters]" in out


def test_a_directory_is_no_data_file(tmp_path):
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(DataError, match=r"train.jsonl: a directory or device, not a data file$"):
        run_data_check(tmp_path / "train.jsonl")


def test_a_tokenizer_may_be_a_hub_name(write):
    path = write({"prompt": "one", "label": 1})
    with pytest.raises(ConfigError, match=r"^--tokenizer: /nowhere is no directory"):
        run_data_check(path, "/nowhere")
    with pytest.raises(ConfigError, match=r"^--tokenizer: 'hf:none' is no hub name"):
        run_data_check(path, "hf:none")
