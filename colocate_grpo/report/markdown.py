"""Markdown: tables, code blocks and numbers as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

ABSENT = "–"
MAX_VALUE = 160


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose other columns are figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text columns."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def code(text: str, language: str = "") -> str:
    """A fenced block; the fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def value_text(value: Any) -> str:
    """The value of an option, shortened where it is long."""
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return f"`{text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + '…'}`"


def number(value: float | None, digits: int = 3) -> str:
    """A figure with `digits` significant ones, thousands separated; a dash where there is none."""
    if value is None or math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return _minus(f"{int(value):,}")
    if abs(value) >= 10**digits:
        return _minus(f"{value:,.0f}")
    if abs(value) < 1e-3:
        return _minus(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return _minus(f"{value:.{decimals}f}")


def percent(value: float | None) -> str:
    """A share in percent with one decimal."""
    return ABSENT if value is None or math.isnan(value) else _minus(f"{100 * value:.1f} %")


def points(value: float) -> str:
    """A difference of shares in percentage points, signed."""
    return _minus(f"{100 * value:+.1f}") if math.isfinite(value) else number(value)


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if 0 < seconds < 0.001:
        return "< 1 ms"
    return f"{number(seconds)} s"


def moment(unix: float) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def step_ranges(steps: Sequence[int]) -> str:
    """`3-7, 9` for sorted steps."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], step]
        else:
            ranges.append([step])
    return ", ".join("–".join(map(str, r)) for r in ranges)


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
