"""Appended lines survive other writers, crashes and full disks."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from colocate_grpo.observe.jsonl import append_row, read_lines

# More than the limit on file sizes that the process is given: the last write is cut short, as on a full disk.
FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from colocate_grpo.observe.jsonl import append_row
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for i in range(100):
    append_row(Path(sys.argv[1]), {"i": i, "text": "x" * 50})
"""


def _append_many(path: Path, writer: int) -> None:
    for i in range(300):
        append_row(path, {"writer": writer, "i": i, "text": "x" * (i % 97)})


def test_processes_that_append_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_append_many, [path] * 3, range(3)))
    lines = read_lines(path)
    assert lines.damaged == []
    for writer in range(3):
        assert [row["i"] for row in lines.rows if row["writer"] == writer] == list(range(300))


def test_a_line_cut_off_anywhere_costs_itself_and_nothing_else(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    append_row(whole, {"i": 0})
    before = whole.stat().st_size
    append_row(whole, {"i": 1, "text": "größer"})
    content = whole.read_bytes()
    for cut in range(before, len(content)):
        path = tmp_path / f"cut_{cut}.jsonl"
        path.write_bytes(content[:cut])
        append_row(path, {"i": 2})
        lines = read_lines(path)
        # Only the newline may be missing: then the row itself is whole.
        is_whole = cut == len(content) - 1
        assert [row["i"] for row in lines.rows] == ([0, 1, 2] if is_whole else [0, 2])
        assert len(lines.damaged) == (0 if is_whole or cut == before else 1)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"i": 0}\n{"i": \n[1, 2]\n\xff\xfe\n\n{"i": 5}')
    lines = read_lines(path)
    assert lines.rows == [{"i": 0}, {"i": 5}]
    assert [damaged.number for damaged in lines.damaged] == [2, 3, 4]
    assert str(lines.damaged[0]) == f"{path}:2: damaged line left out: '{{\"i\": '"


def test_a_full_disk_is_an_error_and_the_file_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL_THE_DISK, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is the disk full?" in done.stderr
    append_row(path, {"i": "after"})
    lines = read_lines(path)
    assert len(lines.damaged) == 1
    assert [row["i"] for row in lines.rows] == [*range(len(lines.rows) - 1), "after"]


def test_numbers_of_numpy_and_torch_are_written_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": np.float32(0.5), "b": torch.tensor(2), "c": Path("x")})
    assert json.loads(path.read_text()) == {"a": 0.5, "b": 2, "c": "x"}


def test_an_absent_file_has_no_rows(tmp_path: Path) -> None:
    lines = read_lines(tmp_path / "nothing.jsonl")
    assert (lines.rows, lines.damaged) == ([], [])
