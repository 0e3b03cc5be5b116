"""The figures of metrics.jsonl that can be reckoned with: one damaged value costs itself and no more."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from colocate_grpo.observe.jsonl import Row
from colocate_grpo.observe.metrics import is_number

FINGERPRINT = "data/fingerprint"


def usable_figures(rows: Iterable[Row]) -> tuple[list[Row], Counter[str]]:
    """Rows without what is no figure, and in how many rows each key is lost."""
    lost: Counter[str] = Counter()
    return [_usable(row, lost) for row in rows], lost


def _usable(row: Row, lost: Counter[str]) -> Row:
    wrong = {key for key, value in row.items() if not _fits(key, value)}
    lost.update([*wrong, *_halves(row)])
    return {key: value for key, value in row.items() if key not in wrong}


def _halves(row: Row) -> list[str]:
    """What is absent of results and protocols, which say nothing without each other."""
    results = {key.removeprefix("eval/") for key in row if key.startswith("eval/") and key.count("/") == 1}
    protocols = {key.removeprefix("protocol/") for key in row if key.startswith("protocol/")}
    return [f"protocol/{name}" for name in results - protocols] + [f"eval/{name}" for name in protocols - results]


def _fits(key: str, value: Any) -> bool:
    kind, _, name = key.partition("/")
    return not name or key == FINGERPRINT or _FITS.get(kind, _is_anything)(value)


def _is_finite(value: Any) -> bool:
    """Whether it can be added up: JSON's reader also knows NaN, and whole numbers too large for a float."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _is_anything(_value: Any) -> bool:
    return True


_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("rollout", "train", "perf", "memory", "data", "eval"), _is_finite),
    "protocol": lambda value: isinstance(value, str),
    "protocol_parts": lambda value: isinstance(value, dict),
}
