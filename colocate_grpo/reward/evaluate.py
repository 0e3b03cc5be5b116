"""Evaluate a tree: exactly while it is rational, else with a precision that is known to be enough.

Every operation is bounded: sizes of exact numbers, terms of sums, the exponent of a power. What is over a
bound raises `Undecided`; nothing here can take more than some milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from colocate_grpo.reward.node import INFINITY, Node, neg

MAX_EXACT_BITS = 60_000
MAX_EXPONENT = 1 << 44
MAX_TERMS = 2_000
MAX_OPERATIONS = 30_000

Number = Any  # int, Fraction, mpf or mpc


class Undecided(Exception):
    """Over a bound, or an operation that has no exact or high-precision value here."""


class Undefined(Exception):
    """No value: division by zero, a pole, infinity."""


class NeedPrecision(Exception):
    """Evaluate again with this many bits."""

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.bits = bits


context = mpmath.MPContext()


def is_exact(value: Number) -> bool:
    return isinstance(value, (int, Fraction))


class Evaluator:
    """Values of trees at one point and one precision (bits).

    `high` is the largest binary magnitude in a sum and `spread` the widest range of magnitudes in one sum:
    they say whether the precision was enough. `rounded` is set when an exact number was too large to stay exact.
    With `real`, a step that leaves the real numbers has no value.
    """

    def __init__(self, point: dict[str, Number], bits: int, real: bool = False) -> None:
        self.point = point
        self.real_only = real
        self.bits = bits
        self.high, self.spread = -(1 << 62), 0
        self.rounded = False
        self.operations = 0
        context.prec = bits

    def value(self, node: Node) -> Number:
        self.operations += 1
        if self.operations > MAX_OPERATIONS:
            raise Undecided("too many operations")
        handler = _HANDLERS.get(node.op)
        if handler is None:
            raise Undecided(node.op)
        return handler(self, *node.args)

    def real(self, value: Number) -> Number:
        """An exact number as a big float; asks for more bits when it would lose digits."""
        if not is_exact(value):
            return value
        size = max(value.numerator.bit_length(), value.denominator.bit_length())
        if size + 64 > self.bits:
            if size > MAX_EXACT_BITS:
                self.rounded = True
            else:
                raise NeedPrecision(size * 2 + 128)
        result = context.mpf(value.numerator)
        return result / value.denominator if isinstance(value, Fraction) else result

    def finite(self, value: Number) -> Number:
        if value and not isinstance(context.mag(value), int):
            raise Undefined("not finite")
        if self.real_only and isinstance(value, context.mpc):
            raise Undefined("not real")
        return value

    # -- operations --------------------------------------------------------------------------------------------
    def add(self, *terms: Node) -> Number:
        values = [self.value(term) for term in terms]
        if all(is_exact(value) for value in values):
            return _bounded(sum(values))
        parts = [self.real(value) for value in values]
        magnitudes = [context.mag(term) for term in parts if term]
        if magnitudes:
            self.high = max(self.high, *magnitudes)
            self.spread = max(self.spread, max(magnitudes) - min(magnitudes))
        return sum(parts[1:], parts[0])

    def mul(self, *factors: Node) -> Number:
        result: Number = 1
        for factor in factors:
            value = self.value(factor)
            if is_exact(result) and is_exact(value):
                result = _bounded(result * value)
            elif is_exact(value) and value == 0:
                result = 0
            else:
                result = self.real(result) * self.real(value)
        return result

    def inv(self, node: Node) -> Number:
        value = self.value(node)
        if not value:
            raise Undefined("division by zero")
        if is_exact(value):
            return _normal(Fraction(1, 1) / value)
        return 1 / value

    def pow(self, base: Node, exponent: Node) -> Number:
        return self.power(self.value(base), self.value(exponent))

    def power(self, base: Number, exponent: Number) -> Number:
        if is_exact(base) and base in (0, 1):
            return self._trivial_power(base, exponent)
        if is_exact(exponent):
            if is_exact(base):
                exact = _exact_power(base, exponent)
                if exact is not None:
                    return exact
                self._check_exponent(exponent, base)
                if isinstance(exponent, int):
                    self.rounded = True
            exponent = self.real(exponent) if isinstance(exponent, Fraction) else exponent
        base = self.real(base)
        self._check_exponent(exponent, base)
        result = self.finite(context.power(base, exponent))
        if exponent and context.mag(result - 1) < 0:  # near 1, where the bits of a small exponent go
            self.spread = max(self.spread, -context.mag(exponent))
        return result

    def _trivial_power(self, base: Number, exponent: Number) -> Number:
        if base == 1:
            return 1
        if context.re(exponent) <= 0:
            raise Undefined("power of zero")
        return 0

    def _check_exponent(self, exponent: Number, base: Number) -> None:
        if is_exact(base):
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
        else:
            size = abs(context.mag(base)) + 1 if base else 1
        if abs(exponent) * size > MAX_EXPONENT:
            raise Undecided("power too large")

    def const(self, name: str) -> Number:
        if name == "pi":
            return +context.pi
        if name == "e":
            return +context.e
        if name == "i":
            return context.mpc(0, 1)
        raise Undefined(name)

    def symbol(self, name: str) -> Number:
        value = self.point.get(name)
        if value is None:
            raise Undecided(f"symbol {name}")
        return value

    def degrees(self, node: Node) -> Number:
        value = self.value(node)
        return self.real(value) * context.pi / 180

    def percent(self, node: Node) -> Number:
        value = self.value(node)
        return _normal(Fraction(value) / 100) if is_exact(value) else value / 100

    def modulo(self, left: Node, right: Node) -> Number:
        a, b = self.value(left), self.value(right)
        if not (isinstance(a, int) and isinstance(b, int)):
            raise Undecided("mod of non-integers")
        if b == 0:
            raise Undefined("mod 0")
        return a % b

    def apply(self, name: str, *arguments: Node) -> Number:
        """An unknown function: a fixed analytic one that depends on its name, so that f(1) + f(2) is not f(3)."""
        total = context.mpf(_seed(name)) / 1000
        for index, argument in enumerate(arguments):
            total += self.real(self.value(argument)) * (_seed(name + str(index)) % 97 + 3) / 50
        return context.cos(total) + 2

    def function(self, name: str, *arguments: Node) -> Number:
        from colocate_grpo.reward.functions import FUNCTIONS

        handler = FUNCTIONS.get(name)
        if handler is None:
            raise Undecided(name)
        return handler(self, *[self.value(argument) for argument in arguments])

    def series(self, kind: str) -> Callable[..., Number]:
        def total(body: Node, name: str, low: Node, high: Node) -> Number:
            if INFINITY in (low, high) or neg(INFINITY) in (low, high):
                raise Undecided("infinite series")
            first, last = self.value(low), self.value(high)
            if not (is_exact(first) and is_exact(last)) or last - first > MAX_TERMS:
                raise Undecided("bounds of a series")
            if not (isinstance(first, int) and isinstance(last, int)):
                raise Undefined("bounds that are not whole")
            outer = self.point
            result: Number = 0 if kind == "sum" else 1
            for index in range(first, last + 1):
                self.point = {**outer, name: index}
                term = self.value(body)
                exact = is_exact(term) and is_exact(result)
                left, right = (result, term) if exact else (self.real(result), self.real(term))
                result = left + right if kind == "sum" else left * right
                result = _bounded(result) if exact else result
            self.point = outer
            return result

        return total


def _seed(name: str) -> int:
    return sum((index + 7) * ord(char) * 31 for index, char in enumerate(name)) % 9973


def _normal(value: int | Fraction) -> int | Fraction:
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


def _bounded(value: int | Fraction) -> int | Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * MAX_EXACT_BITS:
        raise Undecided("number too large")
    return _normal(value)


def _exact_power(base: int | Fraction, exponent: int | Fraction) -> int | Fraction | None:
    """The rational value of a power, or None when there is none within the size bound."""
    if isinstance(exponent, Fraction):
        if exponent.denominator > 64:
            return None
        root = _exact_root(base, exponent.denominator)
        if root is None:
            return None
        base, exponent = root, exponent.numerator
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_EXACT_BITS:
        return None
    return _normal(Fraction(base) ** exponent if exponent < 0 else base**exponent)


def _exact_root(value: int | Fraction, degree: int) -> int | Fraction | None:
    if value < 0:
        return None
    top, bottom = integer_root(value.numerator, degree), integer_root(value.denominator, degree)
    return None if top is None or bottom is None else _normal(Fraction(top, bottom))


def integer_root(value: int, degree: int) -> int | None:
    """The exact root of a non-negative integer, or None."""
    if degree == 2 and value.bit_length() <= MAX_EXACT_BITS:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 2_000:
        return None
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < value else (low, middle)
    return low if low**degree == value else None


_HANDLERS: dict[str, Callable[..., Number]] = {
    "num": lambda self, value: _normal(value),
    "value": lambda self, value: value,
    "sym": Evaluator.symbol,
    "const": Evaluator.const,
    "add": Evaluator.add,
    "mul": Evaluator.mul,
    "inv": Evaluator.inv,
    "pow": Evaluator.pow,
    "deg": Evaluator.degrees,
    "percent": Evaluator.percent,
    "mod": Evaluator.modulo,
    "app": Evaluator.apply,
    "fn": Evaluator.function,
    "sum": lambda self, *args: self.series("sum")(*args),
    "prod": lambda self, *args: self.series("prod")(*args),
}
