"""`grade`: files, filter, agreement, and bad rows by their line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from colocate_grpo.errors import DataError
from colocate_grpo.reward.command import run_grade

ROWS = [
    {"pred": r"\dfrac12", "gold": "0.5", "expected": 1, "id": "a"},
    {"pred": "6", "gold": 5, "expected": 0},
    {"pred": "7", "gold": "7", "expected": 0},
    {"response": r"<think></think>\boxed{x+1}", "gold": "1+x", "expected": 1},
    {"response": r"\boxed{5}", "gold": "5"},
    {"pred": "5", "gold": ""},
]


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_file_to_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    source.write_text(lines(ROWS))
    assert run_grade(str(source), str(out), timeout_s=20, workers=1) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["score"] for row in graded] == [1.0, 0.0, 1.0, 1.0, 0.0, None]
    assert [row["reason"] for row in graded] == ["correct", "wrong", "correct", "correct", "no_answer", "bad_gold"]
    assert graded[0]["id"] == "a"
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "agreement 75.00 % (3 of 4)" in shown.err
    assert "1 (false positives)" in shown.err
    assert "0 (false negatives)" in shown.err
    assert "line 3: expected 0, correct: '7' against '7'" in shown.err
    assert "line 6: bad gold, no score: gold is empty" in shown.err


def test_filter(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    rows = [{"pred": "5", "gold": "5"}, {"response": r"\boxed{\ud800}", "gold": "5"}]
    assert run_grade("-", None, timeout_s=20, workers=1, stdin=io.StringIO(lines(rows) + "\n"), stdout=out) == 0
    assert [json.loads(line)["reason"] for line in out.getvalue().splitlines()] == ["correct", "unparsable"]
    assert "agreement" not in capfd.readouterr().err


@pytest.mark.parametrize(("scope", "reason"), [("auto", "correct"), ("whole", "correct"), ("after_think", "no_answer")])
def test_scope_of_a_file_without_thinking(scope: str, reason: str) -> None:
    out = io.StringIO()
    row = lines([{"response": r"\boxed{5}", "gold": "5"}])
    run_grade("-", "-", timeout_s=20, workers=1, answer_scope=scope, stdin=io.StringIO(row), stdout=out)
    assert json.loads(out.getvalue())["reason"] == reason


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a list"),
        ('{"pred": "5"}', "no gold; keys are 'pred'"),
        ('{"gold": "5"}', "neither response nor pred"),
        ('{"gold": "5", "pred": "5", "response": "5"}', "response and pred"),
        ('{"gold": "5", "pred": 5}', "pred is a int"),
        ('{"gold": "5", "pred": "5", "expected": 2}', "expected is 2; allowed: 0, 1"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: str, message: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"pred": "5", "gold": "5"}\n\n' + row + "\n")
    with pytest.raises(DataError, match=message) as error:
        run_grade(str(source), None)
    assert str(error.value).startswith(f"{source}:3: ")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        run_grade(str(tmp_path / "none.jsonl"), None)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        run_grade(str(binary), None)
    source = tmp_path / "rows.jsonl"
    source.write_text('{"pred": "5", "gold": "5"}\n')
    with pytest.raises(DataError, match=r"none/out\.jsonl"):
        run_grade(str(source), str(tmp_path / "none" / "out.jsonl"), workers=1)
