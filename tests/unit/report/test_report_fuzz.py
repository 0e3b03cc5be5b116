"""A run directory in which every field of every kind of row, and every file, is damaged in turn: the report is written
all the same, and names what is lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_builder import RunBuilder

from colocate_grpo.config_file import to_yaml
from colocate_grpo.report.experiment import compose, write_report
from colocate_grpo.report.missing import missing
from colocate_grpo.report.record import load_record

Row = dict[str, Any]
REFERENCE = Path(__file__).parents[3] / "reports" / "reference_8x4090.json"
CONFIG = {
    "run": {"name": "fuzzed", "steps": 3},
    "model": {"path": "models/tiny"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 64},
    "eval": {"sets": [{"name": "aime", "path": "aime.jsonl", "samples": 2}]},
}
DAMAGES: dict[str, Any] = {"null": None, "text": "it's", "list": [[]], "nan": float("nan"), "object": {}}
# What nobody can know to be wrong, by field; what is only shown is in no field's way.
POSSIBLE = {
    "kind": {"text"},
    "baseline": {"null"},
    "reason": {"text"},
    "protocol/aime": {"text"},
    "protocol_parts/aime": {"object"},
    "command_line": {"text"},
    "versions": {"object"},
    "hardware": {"object"},
    "changes": {"object"},
    "bytes": {"nan"},
    **{key: set(DAMAGES) for key in ("commit", "checkpoint", "outcome", "message", "data/fingerprint")},
}
FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "garbage": lambda whole: bytes(range(256)),
    "a flipped bit in the header": lambda whole: whole[:4] + bytes([whole[4] ^ 0xC0]) + whole[5:],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 steps in two attempts, with an evaluation and a save after each, a rollback and a changed option."""
    run = RunBuilder(tmp_path_factory.mktemp("runs") / "run", problems=4, samples=2)
    (run.run_dir / "config.yaml").write_text(to_yaml(CONFIG))
    run.start()
    run.metrics.append("attempt", -1, {"data/rows": 9, "data/unique": 6, "data/usable": 8, "data/fingerprint": "f0"})
    run.evaluate(0, baseline=0)
    for step in range(2):
        _step(run, step)
    run.metrics.append("rollback", 0, {"from": 1, "rollback": 1, "reason": "entropy rises"})
    run.attempt = 2
    run.events.emit("config_change", changes={"eval.every": [4, 8]})
    run.start(kept=0)
    for step in range(1, 3):
        _step(run, step)
    run.events.emit("run_end", outcome="finished", message="", step=2)
    return run.run_dir


def test_the_undamaged_run_lacks_nothing(run_dir: Path) -> None:
    assert missing(load_record(run_dir)) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_field_is_left_out_and_named(run_dir: Path, name: str) -> None:
    rows = _rows(run_dir / name)
    unnamed = []
    for (i, key), (damage, value) in itertools.product(_places(rows), DAMAGES.items()):
        text = _report_with(run_dir, name, _bytes([*rows[:i], {**rows[i], key: value}, *rows[i + 1 :]]))
        is_possible = damage in POSSIBLE.get(key, ()) or (key == "step" and rows[i]["kind"] != "save" and value is None)
        if "**What is missing**" not in text and not is_possible:
            unnamed.append((rows[i]["kind"], key, damage))
    assert unnamed == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_removed_field_stops_no_report(run_dir: Path, name: str) -> None:
    rows = _rows(run_dir / name)
    for i, key in _places(rows):
        removed = {other: value for other, value in rows[i].items() if other != key}
        text = _report_with(run_dir, name, _bytes([*rows[:i], removed, *rows[i + 1 :]]))
        if key in ("kind", "time", "attempt", "eval/aime", "protocol/aime", "changes"):
            assert "**What is missing**" in text, (rows[i]["kind"], key)


def test_a_damaged_file_is_named(run_dir: Path) -> None:
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file()]
    assert len(files) == 3 + 3 + 4, "two logs, the configuration, 3 dumps of steps and 4 of evaluations"
    for path, (damage, spoil) in itertools.product(files, FILES.items()):
        text = _report_with(run_dir, str(path.relative_to(run_dir)), spoil(path.read_bytes()))
        part = text.partition("**What is missing**")[2].partition("\n## ")[0]
        named = path.name in part or (path.name == "metrics.jsonl" and "No finished step" in part)
        # A whole step between the first and the last is not read.
        assert named or path.name.startswith(("step_1.", "eval_aime_step_0", "eval_aime_step_1")), (path.name, damage)


def test_the_pictures_of_a_run_full_of_damage(run_dir: Path, tmp_path: Path) -> None:
    damages = itertools.cycle([lambda v: v, *(lambda _v, d=damage: d for damage in DAMAGES.values())])
    rows = [
        {key: next(damages)(v) if "/" in key else v for key, v in row.items()}
        for row in _rows(run_dir / "metrics.jsonl")
    ]
    (tmp_path / "metrics.jsonl").write_bytes(_bytes(rows))
    assert "is missing or no figure in" in write_report(tmp_path, reference=REFERENCE).read_text()


def _step(run: RunBuilder, step: int) -> None:
    run.train(step)
    run.evaluate(step)
    run.events.emit("save", step=step, bytes=3)


def _places(rows: list[Row]) -> Iterator[tuple[int, str]]:
    """(row, key) of every field of the last row of each kind: that one counts."""
    last = {row["kind"]: i for i, row in enumerate(rows)}
    return ((i, key) for i in last.values() for key in rows[i])


def _report_with(run_dir: Path, name: str, content: bytes) -> str:
    """The report of the run with other contents of one file."""
    path = run_dir / name
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        return compose(load_record(run_dir), reference=REFERENCE)
    finally:
        path.write_bytes(whole)


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _bytes(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
