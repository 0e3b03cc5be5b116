"""Rows of a data file, jsonl or parquet, each with where it stands; what is broken is named, not guessed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from colocate_grpo.errors import DataError, nearest

PROMPT_KEYS = ("prompt", "problem")
LABEL_KEYS = ("label", "answer")
Message = dict[str, Any]
JSON_NAMES = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a switch", type(None): "null"}
LabelKind = Literal["integer", "decimal", "text"]


@dataclass(frozen=True)
class Row:
    """One problem as the file has it; `line` counts from 1 (a row number in parquet)."""

    line: int
    prompt: str | list[Message]
    label: str
    label_kind: LabelKind
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BrokenRow:
    """A row that cannot be used, and why."""

    line: int
    reason: str


class RowError(ValueError):
    """Why a row cannot be used."""


def read_rows(
    path: str | Path, prompt_key: str | None = None, label_key: str | None = None
) -> Iterator[Row | BrokenRow]:
    """Every row of the file in order, good or broken. Raises DataError where the file itself is unusable.

    Keys may be dotted (`reward_model.ground_truth`). Without a key the usual names are tried.
    """
    for line, values in _raw_rows(Path(path)):
        try:
            if isinstance(values, BrokenRow):
                raise RowError(values.reason)
            yield parse_row(line, values, prompt_key, label_key)
        except RowError as error:  # one broken line must not hide the others
            yield BrokenRow(line, str(error))


def good_rows(path: str | Path, prompt_key: str | None = None, label_key: str | None = None) -> list[Row]:
    """All rows of a file without a broken one. Raises DataError that names the broken lines."""
    rows = list(read_rows(path, prompt_key, label_key))
    broken = [row for row in rows if isinstance(row, BrokenRow)]
    if broken:
        raise DataError(f"{path}: {describe_broken(broken)}")
    if not rows:
        raise DataError(f"{path}: empty data file (expected one row a problem)")
    return [row for row in rows if isinstance(row, Row)]


def describe_broken(broken: Sequence[BrokenRow], limit: int = 5) -> str:
    """One line: how many are broken, and the first few with their reasons."""
    shown = "; ".join(f"line {row.line}: {row.reason}" for row in broken[:limit])
    more = f"; and {len(broken) - limit} more" if len(broken) > limit else ""
    return f"{len(broken)} broken line{'s' if len(broken) > 1 else ''}: {shown}{more}"


def parse_row(line: int, values: Any, prompt_key: str | None, label_key: str | None) -> Row:
    """Check one row. Raises RowError."""
    if not isinstance(values, dict):
        raise RowError(f"{JSON_NAMES[type(values)]}, expected an object")
    prompt = _prompt(_pick(values, prompt_key, PROMPT_KEYS, "prompt"))
    label, kind = _label(_pick(values, label_key, LABEL_KEYS, "label"))
    used = {prompt_key or "", label_key or "", *PROMPT_KEYS, *LABEL_KEYS}
    row = Row(line, prompt, label, kind, {k: v for k, v in values.items() if k not in used})
    _refuse_surrogates([prompt, label])
    return row


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        if path.exists():
            raise DataError(f"{path}: a directory or device, not a data file")
        siblings = [p.name for p in path.parent.glob("*") if p.is_file()] if path.parent.is_dir() else []
        raise DataError(f"{path}: no such data file{nearest(path.name, siblings)}")
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _jsonl(path)
    if path.suffix in (".parquet", ".pq"):
        return _parquet(path)
    raise DataError(f"{path}: unknown kind of data file {path.suffix!r} (allowed: .jsonl, .parquet)")


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            text = raw.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                yield number, _json_value(number, text)


def _json_value(number: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return BrokenRow(number, f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})")
    except UnicodeDecodeError as error:
        return BrokenRow(number, f"not UTF-8 (byte {error.start + 1})")
    except (ValueError, RecursionError) as error:  # an integer over Python's limit of digits, or too deep a nesting
        return BrokenRow(number, f"not readable ({str(error).split(';')[0]})")


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield number, values
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def _pick(values: dict[str, Any], key: str | None, usual: Sequence[str], role: str) -> Any:
    """The value under `key` (dotted), or under the one usual name that is there."""
    if key is None:
        found = [name for name in usual if values.get(name) is not None]
        if not found:
            raise RowError(f"no {role} (keys: {', '.join(map(str, values)) or 'none'}; expected {' or '.join(usual)})")
        return values[found[0]]
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise RowError(f"no {role} under {key!r} (keys: {', '.join(map(str, values))}){nearest(key, map(str, values))}")
    return value


def _prompt(value: Any) -> str | list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise RowError("the prompt is empty")
        return value
    if not isinstance(value, list) or not value:
        raise RowError(f"the prompt is {_shown(value)}, expected text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise RowError("a message of the prompt needs a `role` and a `content` of text")
    if not any(message["role"] == "user" for message in value):
        raise RowError("no message of the prompt has the role `user`")
    return value


def _label(value: Any) -> tuple[str, LabelKind]:
    """Label as text: 27, 27.0 and "27" are the same answer."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"the label is {_shown(value)}, expected text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"the label is {value}, expected a finite number")
        value = int(value) if value.is_integer() else value
    text = _number_text(value).strip()
    if not text:
        raise RowError("the label is empty")
    return text, _kind(text)


def _number_text(value: str | int | float) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python refuses to print integers of more than 4300 digits
        raise RowError("the label has too many digits") from error


def _kind(text: str) -> LabelKind:
    digits = text.removeprefix("-").replace(",", "")
    if digits.isdecimal():
        return "integer"
    return "decimal" if digits.replace(".", "", 1).isdecimal() else "text"


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("half a surrogate pair, which is no character") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
