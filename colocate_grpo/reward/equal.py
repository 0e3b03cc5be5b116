"""Whether two expressions have the same value: exact arithmetic, or big floats at points that settle it."""

from __future__ import annotations

import zlib
from fractions import Fraction
from functools import lru_cache

from colocate_grpo.reward.evaluate import (
    Evaluator,
    NeedPrecision,
    Number,
    Undecided,
    Undefined,
    context,
    is_exact,
)
from colocate_grpo.reward.node import Node, has, symbols

FIRST_BITS, MAX_BITS = 192, 8_000
ZERO_BITS = 4_096
GUARD = 48  # bits of the working precision that rounding errors may eat
_REGIONS = ((0.2, 0.9), (1.1, 3.0), (4.0, 20.0), (-2.0, -0.3), (-9.0, -3.5))
_VALID_POINTS = 2


def same_value(pred: Node, gold: Node) -> bool:
    """True when the two are equal wherever both are defined and real.

    Raises `Undecided` when neither equality nor inequality can be shown within the bounds.
    """
    if pred == gold:
        return True
    names = sorted(symbols(pred) | symbols(gold))
    if not names:
        return _same_at(pred, gold, {}) is True
    return _same_function(pred, gold, names)


def _same_function(pred: Node, gold: Node, names: list[str]) -> bool:
    imaginary = has_imaginary(pred) or has_imaginary(gold)
    valid = 0
    for region in range(3 if imaginary else len(_REGIONS)):
        same = _same_at(pred, gold, _point(names, region), real=not imaginary)
        if same is False:
            return False
        valid += same is True
    if valid >= _VALID_POINTS:
        return True
    # Not real on real points, such as (-1)^n: whole numbers, then any complex value.
    for real in (True, False):
        found = [_same_at(pred, gold, _whole_point(names, start), real=real) for start in (2, 3, 5, 8)]
        if False in found:
            return False
        if found.count(True) >= _VALID_POINTS:
            return True
    return False


def has_imaginary(node: Node) -> bool:
    return has(node, "const") and Node("const", ("i",)) in _constants(node)


def _constants(node: Node) -> set[Node]:
    found, stack = set(), [node]
    while stack:
        top = stack.pop()
        if top.op == "const":
            found.add(top)
        stack.extend(arg for arg in top.args if isinstance(arg, Node))
    return found


def _same_at(pred: Node, gold: Node, point: dict[str, Number], real: bool = False) -> bool | None:
    """Whether the values agree at a point; None when either has none (or none that is real)."""
    bits = FIRST_BITS
    while True:
        try:
            evaluator = Evaluator(point, bits, real)
            a, b = evaluator.value(pred), evaluator.value(gold)
            return _agree(evaluator, a, b)
        except Undefined:
            return None
        except NeedPrecision as need:
            if need.bits > MAX_BITS:
                raise Undecided("precision") from need
            bits = need.bits
        except (OverflowError, ValueError, ZeroDivisionError, TypeError) as error:
            # mpmath reports poles, and orders complex numbers, through the exceptions of Python's numbers.
            raise Undecided(type(error).__name__) from error


def _agree(evaluator: Evaluator, a: Number, b: Number) -> bool:
    if is_exact(a) and is_exact(b):
        return a == b
    a, b = evaluator.real(a), evaluator.real(b)
    difference = a - b
    if not difference and not a:
        _check_precision(evaluator, 0)
        return True
    size = max(context.mag(value) for value in (a, b) if value)
    high = max(evaluator.high, size)
    if difference and context.mag(difference) > high - evaluator.bits + GUARD:
        return False
    _check_precision(evaluator, high - size)
    if evaluator.rounded and not evaluator.point:
        raise Undecided("equal as far as can be seen, but too large to be sure")
    return True


def _check_precision(evaluator: Evaluator, lost: int) -> None:
    """Equal as far as this precision sees: look closer where `lost` bits were cancelled, or sums were uneven."""
    needed = max(evaluator.spread, lost) + 2 * GUARD
    if needed <= evaluator.bits:
        return
    if needed > MAX_BITS:
        raise Undecided("magnitudes too far apart")
    # Both sides zero: what is left is noise at every precision, and this much of it is proof enough.
    if evaluator.bits < ZERO_BITS:
        raise NeedPrecision(min(max(needed + 64, 2 * evaluator.bits), ZERO_BITS))


@lru_cache(maxsize=4096)
def _coordinate(name: str, region: int) -> Fraction:
    low, high = _REGIONS[region]
    fraction = Fraction(zlib.crc32(f"{name}/{region}".encode("utf-8", "replace")) % (1 << 18), 1 << 18)
    return Fraction(low) + fraction * Fraction(high - low)


def _point(names: list[str], region: int) -> dict[str, Number]:
    return {name: _coordinate(name, region).limit_denominator(10_007) for name in names}


def _whole_point(names: list[str], start: int) -> dict[str, Number]:
    return {name: start + 2 * index + (index * index) % 3 for index, name in enumerate(names)}


def constant_ratio(left: Node, right: Node) -> float | None:
    """The ratio left / right when it is the same, and not zero, at every point; only its sign is precise.

    Two equations `left = 0` and `right = 0` are then the same equation.
    """
    names = sorted(symbols(left) | symbols(right))
    if not names or symbols(left) != symbols(right):
        return None
    base = _point(names, 1)
    try:
        a, b = Evaluator(base, 512).value(left), Evaluator(base, 512).value(right)
    except (Undefined, NeedPrecision) as error:
        raise Undecided("equation") from error
    if isinstance(a, context.mpc) or isinstance(b, context.mpc) or not a or not b:
        return None
    # left(x) * right(base) = right(x) * left(base) at every x
    scaled = [Node("mul", (node, Node("value", (factor,)))) for node, factor in ((left, b), (right, a))]
    return float(context.sign(a) * context.sign(b)) if _same_function(scaled[0], scaled[1], names) else None
