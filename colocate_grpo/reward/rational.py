"""Plain numbers, read and compared exactly in linear time: the answers that never need a worker."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 1_000

_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_INTEGER = re.compile(r"[-+]?[0-9]+\Z")
_DECIMAL = re.compile(rf"([-+]?)({_NUMBER})\Z")
_FRACTION = re.compile(
    rf"([-+]?)(?:({_NUMBER})/([-+]?)({_NUMBER})|\\frac\{{([-+]?)({_NUMBER})\}}\{{([-+]?)({_NUMBER})\}}"
    r"|\\frac([0-9])([0-9]))\Z"
)


def parse_rational(text: str) -> Fraction | int | None:
    """The value of an integer, decimal or simple fraction without white space; None for anything else."""
    if len(text) > MAX_CHARS:
        return None
    if _INTEGER.match(text):
        return int(text)
    decimal = _DECIMAL.match(text)
    if decimal:
        return Fraction(text if decimal[2][0] != "." else f"{decimal[1]}0{decimal[2]}")
    match = _FRACTION.match(text)
    return _quotient(match) if match else None


def _quotient(match: re.Match[str]) -> Fraction | None:
    parts = [part for part in match.groups() if part is not None]
    negative = sum(part == "-" for part in parts) % 2
    top, bottom = (Fraction("0" + part) for part in parts if part not in ("", "+", "-"))
    if not bottom:
        return None
    return -top / bottom if negative else top / bottom


def significant_digits(text: str) -> int:
    """Significant digits of a decimal literal, 0 for anything else."""
    match = _DECIMAL.match(text)
    return len(match[2].replace(".", "").lstrip("0")) if match and "." in match[2] else 0


def is_rounding(decimal: str, value: Fraction | int) -> bool:
    """Whether a decimal literal is `value` rounded, or cut, at the last digit of the literal."""
    places = len(decimal.partition(".")[2])
    return abs(Fraction(parse_rational(decimal) or 0) - value) < Fraction(1, 10**places)
