"""Values of the named functions, exact where the arguments are."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

from colocate_grpo.reward.evaluate import Evaluator, Number, Undecided, Undefined, context, is_exact
from colocate_grpo.reward.tokens import words

MAX_FACTORIAL = 3_000
_OF_EXPONENTIALS = ("sinh", "cosh", "tanh", "coth")  # sums of e^x and e^-x
MAX_GAMMA = 10**15
MAX_GAMMA_BITS = 640  # mpmath's series takes seconds at a few thousand bits


def _analytic(name: str) -> Callable[..., Number]:
    function = getattr(context, name)

    def value(self: Evaluator, argument: Number) -> Number:
        rounded, argument = not is_exact(argument), self.real(argument)
        if rounded and argument:  # the error of the argument, seen where the value is (nearly) zero: sin(pi)
            self.high = max(self.high, context.mag(argument))
        if argument and abs(context.mag(argument)) > 64:
            raise Undecided(f"{name} of a huge or tiny number")
        if name in _OF_EXPONENTIALS:
            self.spread = max(self.spread, 3 * int(abs(argument)))
        self.operations += self.bits // 64
        try:
            return self.finite(function(argument))
        except (ValueError, ZeroDivisionError) as error:  # mpmath signals a pole this way
            raise Undefined(name) from error

    return value


def _logarithm(self: Evaluator, argument: Number, base: Number | None = None) -> Number:
    if not argument or base in (0, 1):
        raise Undefined("log 0")
    exact = _exact_logarithm(argument, base)
    if exact is not None:
        return exact
    result = context.ln(self.real(argument))
    return self.finite(result / context.ln(self.real(base)) if base is not None else result)


def _exact_logarithm(argument: Number, base: Number | None) -> int | None:
    if argument == 1 and is_exact(argument):
        return 0
    if not (isinstance(argument, int) and isinstance(base, int)) or argument < 1 or base < 2:
        return None
    power = round(math.log(argument) / math.log(base))
    return power if power * base.bit_length() < 100_000 and base**power == argument else None


def _root(self: Evaluator, radicand: Number, degree: Number) -> Number:
    """The real root where there is one: an odd root of a negative number is negative."""
    if not isinstance(degree, int) or degree == 0:
        return self.power(radicand, 1 / self.real(degree)) if degree else _undefined("root")
    if degree % 2 and 0 < degree < 10_000 and not isinstance(radicand, context.mpc) and radicand < 0:
        return -_root(self, -radicand, degree)
    return self.power(radicand, Fraction(1, degree))


def _undefined(name: str) -> Number:
    raise Undefined(name)


def _factorial(self: Evaluator, argument: Number) -> Number:
    if isinstance(argument, int):
        if argument < 0:
            raise Undefined("factorial")
        if argument <= MAX_FACTORIAL:
            return math.factorial(argument)
        self.rounded = True
    return _gamma(self, argument + 1)


def _double_factorial(self: Evaluator, argument: Number) -> Number:
    if not isinstance(argument, int) or not 0 <= argument <= MAX_FACTORIAL:
        raise Undecided("double factorial")
    return math.prod(range(argument, 0, -2))


def _gamma(self: Evaluator, argument: Number) -> Number:
    argument = self.real(argument)
    if abs(argument) > MAX_GAMMA or self.bits > MAX_GAMMA_BITS:
        raise Undecided("gamma of a huge number, or to very many digits")
    try:
        return self.finite(context.gamma(argument))
    except ValueError as error:  # a pole
        raise Undefined("gamma") from error


def _binomial(self: Evaluator, top: Number, bottom: Number) -> Number:
    if isinstance(top, int) and isinstance(bottom, int):
        if bottom < 0 or 0 <= top < bottom:
            return 0
        if 0 <= top <= MAX_FACTORIAL:
            return math.comb(top, bottom)
        if top < 0:
            raise Undecided("binomial of a negative number")
        self.rounded = True
    upper, lower, rest = (self.real(value + 1) for value in (top, bottom, top - bottom))
    return _gamma(self, upper) / (_gamma(self, lower) * _gamma(self, rest))


def _rounding(exact: Callable[[Any], int], big: Callable[[Any], Any]) -> Callable[..., Number]:
    def value(self: Evaluator, argument: Number) -> Number:
        if is_exact(argument):
            return exact(argument)
        if isinstance(argument, context.mpc):
            raise Undefined("rounding a complex number")
        if argument and context.mag(argument) > self.bits - 64:
            raise Undecided("rounding a huge number")
        return int(big(argument))

    return value


def _absolute(self: Evaluator, argument: Number) -> Number:
    return abs(argument)


def _whole(name: str, function: Callable[[int, int], int]) -> Callable[..., Number]:
    def value(self: Evaluator, *arguments: Number) -> Number:
        if not arguments or not all(isinstance(argument, int) for argument in arguments):
            raise Undecided(f"{name} of non-integers")
        return reduce(function, arguments, arguments[0])

    return value


def _extreme(function: Callable[[Any], Any]) -> Callable[..., Number]:
    def value(self: Evaluator, *arguments: Number) -> Number:
        if any(isinstance(argument, context.mpc) for argument in arguments) or not arguments:
            raise Undefined("order of complex numbers")
        return function(arguments)

    return value


def _determinant(self: Evaluator, size: Number, *cells: Number) -> Number:
    """Laplace expansion: exact, and small enough for the sizes that are allowed."""
    if size * size != len(cells) or size > 6:
        raise Undecided("determinant")
    rows = [list(cells[i * size : (i + 1) * size]) for i in range(size)]
    if not all(is_exact(cell) for cell in cells):
        rows = [[self.real(cell) for cell in row] for row in rows]
    return _laplace(rows)


def _laplace(rows: list[list[Number]]) -> Number:
    if len(rows) == 1:
        return rows[0][0]
    minors = ([row[:j] + row[j + 1 :] for row in rows[1:]] for j in range(len(rows)))
    return sum((-1) ** j * rows[0][j] * _laplace(minor) for j, minor in enumerate(minors))


FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: _analytic(name) for name in words("sin cos tan cot sec csc sinh cosh tanh coth")},
    "arcsin": _analytic("asin"),
    "arccos": _analytic("acos"),
    "arctan": _analytic("atan"),
    "arccot": _analytic("acot"),
    "exp": lambda self, x: self.power(+context.e, x) if x else 1,
    "log": _logarithm,
    "ln": _logarithm,
    "lg": lambda self, x: _logarithm(self, x, 10),
    "root": _root,
    "factorial": _factorial,
    "double_factorial": _double_factorial,
    "binom": _binomial,
    "abs": _absolute,
    "determinant": _determinant,
    "floor": _rounding(math.floor, context.floor),
    "ceil": _rounding(math.ceil, context.ceil),
    "gcd": _whole("gcd", math.gcd),
    "lcm": _whole("lcm", math.lcm),
    "max": _extreme(max),
    "min": _extreme(min),
    "Re": lambda self, x: context.re(x),
    "Im": lambda self, x: context.im(x),
    "arg": lambda self, x: context.arg(x),
    "sgn": lambda self, x: context.sign(x),
}
