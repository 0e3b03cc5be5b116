"""`colocate-grpo grade`: verdicts for a file of answers, and the agreement with labels where there are any."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from colocate_grpo.errors import DataError
from colocate_grpo.reward.extract import CLOSE, resolve_scope
from colocate_grpo.reward.pool import Pending, RewardPool, RewardTask
from colocate_grpo.trajectory import Verdict

SLOWEST = 5
MAX_LISTED = 20


@dataclass
class _Row:
    line: int
    data: dict[str, Any]


def run_grade(
    path: str,
    out: str | None,
    *,
    timeout_s: float = 2.0,
    workers: int = 2,
    answer_scope: str = "auto",
    memory_limit_mb: int = 1024,
    max_chars: int = 200_000,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Grade the rows of a jsonl file (`-`: standard input); returns the exit code.

    A row has `response` or `pred` (the bare content of a box), and `gold`. Rows with `score` and `reason` go to
    `out`, and to standard output when the input is standard input; tables go to standard error. A row that is no
    such object is a DataError with its line.
    """
    rows = _read(path, stdin or sys.stdin)
    options = {"answer_scope": _scope(answer_scope, rows), "max_chars": max_chars}
    with RewardPool("math_boxed", options, workers, timeout_s, memory_limit_mb, max_chars) as pool:
        pending = [_submit(pool, row.data) for row in rows]
        verdicts = [future.result() for future in pending]
    _write(rows, verdicts, path, out, stdout or sys.stdout)
    _report(rows, verdicts, [future.seconds for future in pending], Console(stderr=True))
    return 0


def _read(path: str, stdin: TextIO) -> list[_Row]:
    if path == "-":
        return list(_rows("<stdin>", stdin))
    try:
        with open(path, encoding="utf-8") as lines:
            return list(_rows(path, lines))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error


def _rows(name: str, lines: TextIO) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _Row(number, _row(f"{name}:{number}", line))


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise DataError(f"{where}: a {type(data).__name__}; a row is an object with response or pred, and gold")
    if "gold" not in data:
        raise DataError(f"{where}: no gold; keys are {', '.join(map(repr, data)) or 'none'}")
    texts = [key for key in ("response", "pred") if key in data]
    if len(texts) != 1:
        raise DataError(f"{where}: {' and '.join(texts) or 'neither response nor pred'}; a row has one of the two")
    if not isinstance(data[texts[0]], str):
        raise DataError(f"{where}: {texts[0]} is a {type(data[texts[0]]).__name__}; it must be a string")
    if data.get("expected", 0) not in (0, 1):
        raise DataError(f"{where}: expected is {data['expected']!r}; allowed: 0, 1")
    return data


def _scope(answer_scope: str, rows: list[_Row]) -> str:
    """A file has no chat template: `auto` means after the thinking when any response of the file thinks."""
    if answer_scope == "auto":
        thinks = any(CLOSE in row.data.get("response", "") for row in rows)
        return "after_think" if thinks else "whole"
    return resolve_scope(answer_scope, "")


def _submit(pool: RewardPool, row: dict[str, Any]) -> Pending:
    if "pred" in row:
        return pool.submit_answer(row["pred"], row["gold"])
    return pool.submit(RewardTask(response=row["response"], gold=row["gold"], status=row.get("status", "completed")))


def _write(rows: list[_Row], verdicts: list[Verdict], path: str, out: str | None, stdout: TextIO) -> None:
    lines = [
        json.dumps({**row.data, "score": verdict.score, "reason": verdict.reason, "detail": verdict.detail})
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    text = "".join(line + "\n" for line in lines)
    if out is not None and out != "-":
        partial = Path(out + ".partial")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(out)
        except OSError as error:
            raise DataError(f"{out}: {error.strerror}") from error
    if out == "-" or (out is None and path == "-"):
        stdout.write(text)
        stdout.flush()


# -- tables ----------------------------------------------------------------------------------------------------
def _report(rows: list[_Row], verdicts: list[Verdict], seconds: list[float], console: Console) -> None:
    console.print(_reasons(verdicts))
    labelled = [(row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if "expected" in row.data]
    if labelled:
        _print_agreement(labelled, console)
    _print_bad_golds(rows, verdicts, console)
    slowest = sorted(zip(seconds, rows, verdicts, strict=True), key=lambda item: -item[0])[:SLOWEST]
    console.print(_slowest([item for item in slowest if item[0] > 0.01]))


def _reasons(verdicts: list[Verdict]) -> Table:
    table = Table("reason", "rows", title=f"{len(verdicts)} rows")
    for reason, count in Counter(verdict.reason for verdict in verdicts).most_common():
        table.add_row(reason, str(count))
    return table


def _print_agreement(labelled: list[tuple[_Row, Verdict]], console: Console) -> None:
    counts = Counter((int(row.data["expected"]), int(verdict.score == 1.0)) for row, verdict in labelled)
    table = Table("", "graded 1", "graded 0", title="Confusion")
    table.add_row("expected 1", str(counts[1, 1]), f"{counts[1, 0]} (false negatives)")
    table.add_row("expected 0", f"{counts[0, 1]} (false positives)", str(counts[0, 0]))
    console.print(table)
    agreed = counts[1, 1] + counts[0, 0]
    console.print(f"agreement {100 * agreed / len(labelled):.2f} % ({agreed} of {len(labelled)})")
    wrong = [(row, verdict) for row, verdict in labelled if row.data["expected"] != (verdict.score == 1.0)]
    for row, verdict in wrong[:MAX_LISTED]:
        console.print(
            f"line {row.line}: expected {row.data['expected']}, {verdict.reason}: {_shown(row)}", markup=False
        )


def _print_bad_golds(rows: list[_Row], verdicts: list[Verdict], console: Console) -> None:
    bad = [(row, v) for row, v in zip(rows, verdicts, strict=True) if v.reason == "bad_gold"]
    for row, verdict in bad[:MAX_LISTED]:
        console.print(f"line {row.line}: bad gold, no score: {verdict.detail}", markup=False, style="red")


def _slowest(items: list[tuple[float, _Row, Verdict]]) -> Table | str:
    if not items:
        return "no row took over 10 ms"
    table = Table("seconds", "line", "reason", "row", title="Slowest")
    for seconds, row, verdict in items:
        table.add_row(f"{seconds:.3f}", str(row.line), verdict.reason, _shown(row))
    return table


def _shown(row: _Row) -> str:
    text = row.data.get("pred", row.data.get("response", ""))
    # Lone surrogates and control characters are no text for a terminal.
    shown = f"{text[:60]!r} against {str(row.data['gold'])[:40]!r}"
    return shown.encode("ascii", "backslashreplace").decode()
