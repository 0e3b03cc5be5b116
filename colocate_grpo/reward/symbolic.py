"""What the evaluator cannot decide, by sympy: integrals, derivatives, limits, long and infinite sums.

The sympy expression is built from the tree, node by node: no text reaches a parser of sympy. This may take
any time and any memory, so it runs only in a worker process that is killed when it is late.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from colocate_grpo.reward.evaluate import Undecided
from colocate_grpo.reward.node import Node, has
from colocate_grpo.reward.tokens import words

SYMBOLIC_OPS = ("int", "sum", "prod", "lim")
_DIGITS = 60
_CONSTANTS = {"pi": "pi", "e": "E", "i": "I", "infty": "oo"}
_FUNCTIONS = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "ln": "log", "ceil": "ceiling"}
_FUNCTIONS |= {"binom": "binomial", "abs": "Abs", "max": "Max", "min": "Min", "factorial": "factorial", "root": "root"}
_FUNCTIONS |= {name: name for name in words("sin cos tan cot sec csc sinh cosh tanh coth log exp floor")}


def needs_symbolic(pred: Node, gold: Node) -> bool:
    """Whether sympy could decide what the evaluator could not."""
    return has(pred, *SYMBOLIC_OPS) or has(gold, *SYMBOLIC_OPS)


def same_symbolic(pred: Node, gold: Node) -> bool:
    """Whether sympy shows the two equal. Unbounded: only for a worker process."""
    import sympy

    left, right = build(pred), build(gold)
    difference = left.doit() - right.doit()
    if difference.free_symbols:
        return bool(sympy.simplify(difference) == 0)
    return _vanishes(difference, left)


def _vanishes(difference: Any, scale: Any) -> bool:
    if difference == 0:
        return True
    value = difference.evalf(_DIGITS)
    size = abs(scale.evalf(15)) + 1
    return bool(value.is_number and abs(value) < size * 10 ** (-_DIGITS // 2))


def build(node: Node) -> Any:
    """The unevaluated sympy expression of a tree; Undecided for an operation that has none."""
    handler = _BUILDERS.get(node.op)
    if handler is None:
        raise Undecided(node.op)
    return handler(*node.args)


def _number(value: int | Fraction) -> Any:
    import sympy

    return sympy.Rational(value.numerator, value.denominator)


def _constant(name: str) -> Any:
    import sympy

    return getattr(sympy, _CONSTANTS[name])


def _symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, real=True)


def _operation(name: str) -> Callable[..., Any]:
    def make(*arguments: Node) -> Any:
        import sympy

        return getattr(sympy, name)(*map(build, arguments), evaluate=False)

    return make


def _function(name: str, *arguments: Node) -> Any:
    import sympy

    if name not in _FUNCTIONS:
        raise Undecided(name)
    return getattr(sympy, _FUNCTIONS[name])(*map(build, arguments))


def _series(name: str) -> Callable[..., Any]:
    def make(body: Node, variable: str, low: Node, high: Node) -> Any:
        import sympy

        return getattr(sympy, name)(build(body), (_symbol(variable), build(low), build(high)))

    return make


def _limit(body: Node, variable: str, point: Node) -> Any:
    import sympy

    return sympy.Limit(build(body), _symbol(variable), build(point))


def _integral(body: Node, variable: str, *bounds: Node) -> Any:
    import sympy

    symbol = _symbol(variable)
    return sympy.Integral(build(body), (symbol, *map(build, bounds)) if bounds else symbol)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "num": _number,
    "const": _constant,
    "sym": _symbol,
    "add": _operation("Add"),
    "mul": _operation("Mul"),
    "pow": _operation("Pow"),
    "inv": lambda node: build(node) ** -1,
    "deg": lambda node: build(node) * _constant("pi") / 180,
    "fn": _function,
    "sum": _series("Sum"),
    "prod": _series("Product"),
    "int": _integral,
    "lim": _limit,
}
