"""Sets of real numbers as unions of intervals with exact brackets; inequalities in one variable are such sets."""

from __future__ import annotations

from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise
from typing import NamedTuple

from colocate_grpo.reward.evaluate import Evaluator, NeedPrecision, Number, Undecided, Undefined, context, is_exact
from colocate_grpo.reward.node import INFINITY, Node, neg, symbols

BITS = 512
MINUS_INFINITY = neg(INFINITY)


class Interval(NamedTuple):
    """`low` None: unbounded below; `high` None: unbounded above."""

    low: Number | None
    low_closed: bool
    high: Number | None
    high_closed: bool


RealSet = list[Interval]
EVERYTHING = [Interval(None, False, None, False)]
_POSITIVE = [Interval(0, False, None, False)]
_NEGATIVE = [Interval(None, False, 0, False)]
_NUMBER_SETS = {"R": EVERYTHING, "R^+": _POSITIVE, "R_+": _POSITIVE, "R^-": _NEGATIVE, "R_-": _NEGATIVE}


def value_of(node: Node, point: dict[str, Number] | None = None) -> Number:
    """A real number for an endpoint; Undecided when it is not one."""
    try:
        value = Evaluator(point or {}, BITS).value(node)
    except (Undefined, NeedPrecision) as error:
        raise Undecided("endpoint") from error
    if isinstance(value, context.mpc):
        raise Undecided("complex endpoint")
    return value


def compare(a: Number, b: Number) -> int:
    """-1, 0 or 1; big floats that agree in nearly all their digits are the same number."""
    if is_exact(a) and is_exact(b):
        return (a > b) - (a < b)
    context.prec = BITS
    difference = context.mpf(a.numerator) / a.denominator - b if is_exact(a) else a - _big(b)
    if not difference or context.mag(difference) < max(context.mag(_big(a)), context.mag(_big(b))) - BITS + 64:
        return 0
    return 1 if difference > 0 else -1


def _big(value: Number) -> Number:
    return context.mpf(value.numerator) / value.denominator if is_exact(value) else value


def union(parts: RealSet) -> RealSet:
    """Sorted, with touching and overlapping intervals joined: the canonical form."""
    ordered = sorted((part for part in parts if not _empty(part)), key=cmp_to_key(_order))
    joined: RealSet = []
    for part in ordered:
        if joined and _touch(joined[-1], part):
            joined[-1] = _join(joined[-1], part)
        else:
            joined.append(part)
    return joined


def intersection(a: RealSet, b: RealSet) -> RealSet:
    return union([_meet(left, right) for left in a for right in b])


def complement(parts: RealSet) -> RealSet:
    result = EVERYTHING
    for part in parts:
        outside = []
        if part.low is not None:
            outside.append(Interval(None, False, part.low, not part.low_closed))
        if part.high is not None:
            outside.append(Interval(part.high, not part.high_closed, None, False))
        result = intersection(result, outside)
    return result


def same_set(a: RealSet, b: RealSet) -> bool:
    return len(a) == len(b) and all(_same_interval(x, y) for x, y in zip(a, b, strict=True))


def _same_interval(x: Interval, y: Interval) -> bool:
    if (x.low_closed, x.high_closed) != (y.low_closed, y.high_closed):
        return False
    pairs = ((x.low, y.low), (x.high, y.high))
    return all((p is None) == (q is None) and (p is None or compare(p, q) == 0) for p, q in pairs)


def _empty(part: Interval) -> bool:
    if part.low is None or part.high is None:
        return False
    order = compare(part.low, part.high)
    return order > 0 or (order == 0 and not (part.low_closed and part.high_closed))


def _order(x: Interval, y: Interval) -> int:
    if x.low is None or y.low is None:
        return (y.low is None) - (x.low is None)
    return compare(x.low, y.low) or (y.low_closed - x.low_closed)


def _touch(x: Interval, y: Interval) -> bool:
    if x.high is None or y.low is None:
        return True
    order = compare(y.low, x.high)
    return order < 0 or (order == 0 and (x.high_closed or y.low_closed))


def _join(x: Interval, y: Interval) -> Interval:
    if x.high is None or y.high is None:
        return Interval(x.low, x.low_closed, None, False)
    order = compare(x.high, y.high)
    closed = x.high_closed or y.high_closed if order == 0 else (x if order > 0 else y).high_closed
    return Interval(x.low, x.low_closed, x.high if order >= 0 else y.high, closed)


def _meet(x: Interval, y: Interval) -> Interval:
    low, low_closed = _tighter((x.low, x.low_closed), (y.low, y.low_closed), 1)
    high, high_closed = _tighter((x.high, x.high_closed), (y.high, y.high_closed), -1)
    return Interval(low, low_closed, high, high_closed)


def _tighter(a: tuple[Number | None, bool], b: tuple[Number | None, bool], sign: int) -> tuple[Number | None, bool]:
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    order = compare(a[0], b[0]) * sign
    return (a[0], a[1] and b[1]) if order == 0 else (a if order > 0 else b)


# -- from trees ------------------------------------------------------------------------------------------------
def from_tree(node: Node) -> RealSet | None:
    """The set of reals that a tree describes, or None when it describes none; may raise Undecided."""
    if node.op == "numbers":
        return _NUMBER_SETS.get(node.args[0])
    if node.op == "tuple":
        return _from_brackets(node)
    if node.op == "set":
        return union([Interval(value, True, value, True) for value in map(value_of, node.args)])
    if node.op in ("union", "intersection", "minus"):
        return _combined(node)
    return _from_relation(node) if node.op == "rel" else None


def _from_brackets(node: Node) -> RealSet | None:
    opening, closing, *ends = node.args
    if len(ends) != 2 or opening == "<":
        return None
    low = None if ends[0] == MINUS_INFINITY else value_of(ends[0])
    high = None if ends[1] in (INFINITY, Node("add", (INFINITY,))) else value_of(ends[1])
    if low is not None and high is not None and compare(low, high) >= (1 if (opening, closing) == ("[", "]") else 0):
        return None  # a pair of numbers, and no interval
    return union([Interval(low, opening == "[" and low is not None, high, closing == "]" and high is not None)])


def _combined(node: Node) -> RealSet | None:
    parts = [from_tree(arg) for arg in node.args]
    if any(part is None for part in parts):
        return None
    left, right = parts[0] or [], parts[1] or []
    if node.op == "union":
        return union(left + right)
    return intersection(left, right if node.op == "intersection" else complement(right))


def _from_relation(node: Node) -> RealSet | None:
    """`-2 < x \\le 7`: each link is linear in the one variable, or the set is not known."""
    ops, members = node.args[0], node.args[1:]
    if len(symbols(node)) != 1 or not set(ops) <= {"<", "<=", ">", ">=", "!=", "="}:
        return None
    result = EVERYTHING
    for op, left, right in zip(ops, members, members[1:], strict=False):
        link = _half_line(op, left, right, next(iter(symbols(node))))
        if link is None:
            return None
        result = intersection(result, link)
    return result


_LINEAR_TEST = (0, 1, 7, -5, -1, 100)  # the first two give the line


def _half_line(op: str, left: Node, right: Node, name: str) -> RealSet | None:
    difference = Node("add", (left, neg(right)))
    at = [value_of(difference, {name: x}) for x in _LINEAR_TEST]
    if not all(is_exact(value) for value in at):
        at = [_big(value) for value in at]
    slope = at[1] - at[0]
    if compare(slope, 0) == 0 or any(compare(y, at[0] + x * slope) != 0 for x, y in zip(_LINEAR_TEST, at, strict=True)):
        return None
    root = Fraction(-at[0]) / slope if is_exact(slope) else -at[0] / slope
    if compare(slope, 0) < 0:
        op = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(op, op)
    closed = op.endswith("=")
    if op == "=":
        return [Interval(root, True, root, True)]
    if op == "!=":
        return complement([Interval(root, True, root, True)])
    return [Interval(None, False, root, closed) if op[0] == "<" else Interval(root, closed, None, False)]


# -- relations that are not linear --------------------------------------------------------------------------------
_STEPS = (Fraction(1, 10**6), Fraction(1, 97), Fraction(3, 7), Fraction(29, 11), 13, 101, 12_345)


def describes(relation: Node, parts: RealSet) -> bool | None:
    """Whether an inequality in one variable holds exactly on a set: tested at, around and between its ends.

    None when the relation is not of that form.
    """
    ops, names = relation.args[0], symbols(relation)
    if len(names) != 1 or not set(ops) <= {"<", "<=", ">", ">=", "!="}:
        return None
    name = next(iter(names))
    return all(_holds(relation, {name: x}) == _contains(parts, x) for x in _probes(parts))


def _probes(parts: RealSet) -> list[Number]:
    ends = [end for part in parts for end in (part.low, part.high) if end is not None]
    steps = [sign * step for step in _STEPS for sign in (1, -1)]
    around = [_shifted(end, step) for end in ends for step in steps]
    between = [_shifted(_big(a) + (_big(b) - _big(a)) / 2, 0) for a, b in pairwise(ends)]
    return [*ends, *around, *between, 0, *steps]


def _shifted(value: Number, step: Number) -> Number:
    return value + step if is_exact(value) and is_exact(step) else _big(value) + _big(step)


def _contains(parts: RealSet, x: Number) -> bool:
    point = [Interval(x, True, x, True)]
    return bool(intersection(parts, point))


def _holds(relation: Node, point: dict[str, Number]) -> bool:
    ops, members = relation.args[0], relation.args[1:]
    values = [value_of(member, point) for member in members]
    tests = {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1), "!=": (-1, 1)}
    return all(compare(a, b) in tests[op] for op, a, b in zip(ops, values, values[1:], strict=False))
