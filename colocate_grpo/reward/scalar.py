"""Single values with what they may carry: units, per cent, degrees, bases, ratios, residues."""

from __future__ import annotations

from fractions import Fraction

from colocate_grpo.reward.equal import same_value
from colocate_grpo.reward.node import ZERO, Node, has, num
from colocate_grpo.reward.units import build_unit, conversion

STRUCTURES = ("tuple", "set", "list", "matrix", "rel", "union", "intersection", "minus", "numbers", "choice")
_HUNDRED = num(100)


def same_scalar(pred: Node, gold: Node) -> bool:
    """Whether two values without list structure are the same."""
    if pred == gold:
        return True
    if pred.op in STRUCTURES or gold.op in STRUCTURES or "ellipsis" in (pred.op, gold.op):
        return False
    for op, compare in _CARRIERS.items():
        if op in (pred.op, gold.op):
            return compare(pred, gold)
    if has(pred, *STRUCTURES, "ellipsis") or has(gold, *STRUCTURES, "ellipsis"):
        return False
    return same_value(pred, gold)


def _quantities(pred: Node, gold: Node) -> bool:
    (left, left_factors), (right, right_factors) = _split(pred), _split(gold)
    factor = conversion(build_unit(left_factors), build_unit(right_factors))
    if factor is None or _other_measure(left, right_factors) or _other_measure(right, left_factors):
        return False
    return same_scalar(left if factor == 1 else Node("mul", (num(factor), left)), right)


def _other_measure(value: Node, units: list[tuple[str, int]]) -> bool:
    """A per cent is no number of years, and degrees are no length."""
    angle = units and units[0][0].lower() in ("rad", "radian", "radians")
    measured = any(exponent > 0 and build_unit([(word, 1)])[0] for word, exponent in units)
    return measured and not angle and value.op in ("percent", "deg")


def _clocks(pred: Node, gold: Node) -> bool:
    """`2:37 pm` is `2:37`, part by part."""
    halves = [node.args[0] for node in (pred, gold) if node.op == "clock"]
    left, right = (node.args[1:] if node.op == "clock" else node.args for node in (pred, gold))
    if len(set(halves)) > 1 or {pred.op, gold.op} - {"clock", "ratio"} or len(left) != len(right):
        return False
    return all(same_scalar(a, b) for a, b in zip(left, right, strict=True))


def _split(node: Node) -> tuple[Node, list[tuple[str, int]]]:
    if node.op != "quantity":
        return node, []
    inner, factors = _split(node.args[0])
    return inner, [*factors, *node.args[1]]


def _percents(pred: Node, gold: Node) -> bool:
    """`50\\%` is 50 and one half, but `0.5` is not 50: only the side with the sign has two readings."""
    if pred.op == gold.op:
        return same_scalar(pred.args[0], gold.args[0])
    percent, plain = (pred, gold) if pred.op == "percent" else (gold, pred)
    inner = percent.args[0]
    return same_scalar(inner, plain) or same_scalar(inner, Node("mul", (_HUNDRED, plain)))


def _degrees(pred: Node, gold: Node) -> bool:
    """`90^\\circ` is 90 and `\\pi/2`."""
    if pred.op == gold.op:
        return same_scalar(pred.args[0], gold.args[0])
    degrees, plain = (pred, gold) if pred.op == "deg" else (gold, pred)
    return same_scalar(degrees.args[0], plain) or (has(plain, "const") and same_value(degrees, plain))


def _bases(pred: Node, gold: Node) -> bool:
    """Digits count: `52_8` is `52` written with its base, and not 42."""
    if pred.op == gold.op:
        return pred.args[1] == gold.args[1] and _digits(pred.args[0]) == _digits(gold.args[0])
    based, plain = (pred, gold) if pred.op == "based" else (gold, pred)
    return plain.op == "num" and plain == num(Fraction(based.args[0]))


def _digits(text: str) -> str:
    return text.lstrip("0").lower()


def _ratios(pred: Node, gold: Node) -> bool:
    if pred.op != gold.op:
        ratio, plain = (pred, gold) if pred.op == "ratio" else (gold, pred)
        return len(ratio.args) == 2 and ZERO not in ratio.args and same_scalar(_quotient(*ratio.args), plain)
    if len(pred.args) != len(gold.args):
        return False
    if any(part in (ZERO,) or part.op == "ellipsis" for part in pred.args + gold.args):
        return all(same_scalar(a, b) for a, b in zip(pred.args, gold.args, strict=True))
    pairs = zip(pred.args[1:], gold.args[1:], strict=True)
    return all(same_scalar(_product(a, gold.args[0]), _product(b, pred.args[0])) for a, b in pairs)


def _product(*factors: Node) -> Node:
    return Node("mul", factors)


def _quotient(top: Node, bottom: Node) -> Node:
    return Node("mul", (top, Node("inv", (bottom,))))


def _residues(pred: Node, gold: Node) -> bool:
    """`20 \\pmod{11}` is 9; a plain gold must be the reduced residue, else `0 \\pmod 1` would be any integer."""
    if pred.op == gold.op:
        return same_scalar(pred.args[1], gold.args[1]) and _congruent(pred.args[0], gold.args[0], gold.args[1])
    if gold.op == "cong":
        return same_scalar(pred, gold.args[0]) or _congruent(pred, gold.args[0], gold.args[1])
    value, modulus = pred.args
    return same_scalar(value, gold) or (gold.op == "num" and same_scalar(Node("mod", (value, modulus)), gold))


def _congruent(a: Node, b: Node, modulus: Node) -> bool:
    if any(part.op not in ("num", "mul", "add", "pow") or has(part, "sym") for part in (a, b, modulus)):
        return same_scalar(a, b)
    return same_value(Node("mod", (a, modulus)), Node("mod", (b, modulus)))


_CARRIERS = {
    "clock": _clocks,
    "cong": _residues,
    "quantity": _quantities,
    "percent": _percents,
    "deg": _degrees,
    "based": _bases,
    "ratio": _ratios,
}
