"""Properties that hold for every number, expression and byte string."""

from __future__ import annotations

import random
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from colocate_grpo.reward.grade import grade, grade_response

SLOW_MACHINE = settings(deadline=None, max_examples=150)
integers = st.integers(min_value=-(10**40), max_value=10**40)
fractions = st.builds(Fraction, st.integers(-(10**12), 10**12), st.integers(1, 10**12))


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def right(pred: str, gold: object) -> bool:
    return grade(pred, gold).score == 1.0


@SLOW_MACHINE
@given(integers, integers)
def test_integers_are_compared_exactly(a: int, b: int) -> None:
    assert right(str(a), str(b)) == (a == b)
    assert right(str(a), a)
    assert right(f"{a:,}", str(a))
    assert not right(str(a + 1), str(a))
    assert right(f"{a}.000", str(a))


@SLOW_MACHINE
@given(fractions, st.integers(2, 9))
def test_fractions_in_every_form(value: Fraction, factor: int) -> None:
    text = latex(value)
    assert right(f"{value.numerator}/{value.denominator}", text)
    assert right(rf"\frac{{{value.numerator * factor}}}{{{value.denominator * factor}}}", text)
    assert right(rf"{value.numerator}\cdot\frac{{1}}{{{value.denominator}}}", text)
    assert not right(latex(value + Fraction(1, 10**13)), text)


@SLOW_MACHINE
@given(st.integers(1, 10**6), st.integers(0, 4), st.integers(1, 10**6))
def test_terminating_decimals_are_fractions(whole: int, places: int, digits: int) -> None:
    text = f"{whole}.{digits:0{places + 6}d}"
    assert right(text, latex(Fraction(text)))
    assert not right(text + "1", latex(Fraction(text)))


polynomials = st.lists(st.integers(-20, 20), min_size=1, max_size=5)


def polynomial(coefficients: list[int], order: list[int], spaced: bool) -> str:
    space = " " if spaced else ""
    terms = [f"{coefficients[power]}{space}x^{{{power}}}" for power in order]
    return "+".join(terms).replace("+-", "-")


@SLOW_MACHINE
@given(polynomials, st.randoms(use_true_random=False), st.integers(0, 4))
def test_polynomials_in_any_order(coefficients: list[int], shuffle: random.Random, power: int) -> None:
    order = list(range(len(coefficients)))
    shuffle.shuffle(order)
    gold = polynomial(coefficients, sorted(order), False)
    assert right(polynomial(coefficients, order, True), gold)
    changed = coefficients.copy()
    changed[power % len(changed)] += 1
    assert not right(polynomial(changed, order, False), gold)


@SLOW_MACHINE
@given(st.integers(-30, 30), st.integers(-30, 30), st.integers(-30, 30))
def test_expanding_a_product_keeps_its_value(a: int, b: int, c: int) -> None:
    factored = f"(x+{a})(x+{b})".replace("+-", "-")
    expanded = f"x^2+{a + b}x+{a * b}".replace("+-", "-")
    assert right(factored, expanded)
    assert right(f"{factored}+{c}".replace("+-", "-"), expanded) == (c == 0)


@SLOW_MACHINE
@given(st.integers(1, 400), st.integers(1, 400), st.integers(2, 40))
def test_radicals(a: int, b: int, k: int) -> None:
    assert right(rf"\sqrt{{{a * k * k}}}", rf"{k}\sqrt{{{a}}}")
    assert right(rf"\sqrt{{{a}}}\cdot\sqrt{{{b}}}", rf"\sqrt{{{a * b}}}")
    assert right(rf"\sqrt{{{a}}}", rf"\sqrt{{{b}}}") == (a == b)
    assert not right(rf"\sqrt{{{a * a + 1}}}", str(a))


@SLOW_MACHINE
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_lists_have_no_order_and_tuples_have(values: list[int], shuffle: random.Random) -> None:
    other = values.copy()
    shuffle.shuffle(other)
    plain, shuffled = ", ".join(map(str, values)), ", ".join(map(str, other))
    assert right(shuffled, plain)
    assert right(f"({shuffled})", f"({plain})") == (values == other)
    assert not right(f"{plain}, 99", plain)
    assert not right(", ".join(map(str, values[:-1])), plain)


@SLOW_MACHINE
@given(st.integers(-99, 99), st.integers(1, 99), st.sampled_from("[("), st.sampled_from("])"), st.sampled_from("[("))
def test_interval_brackets_count(low: int, width: int, left: str, right_: str, other: str) -> None:
    high = low + width
    gold = f"{left}{low}, {high}{right_}"
    signs = {"[": r"\le", "]": r"\le", "(": "<", ")": "<"}
    assert right(f"{low} {signs[left]} x {signs[right_]} {high}", gold)
    assert right(f"{other}{low},{high}{right_}", gold) == (other == left)


@SLOW_MACHINE
@given(st.text(max_size=60), st.text(max_size=30))
def test_any_text_gets_a_verdict(answer: str, gold: str) -> None:
    result = grade(answer, gold)
    assert result.score in (0.0, 1.0, None)
    assert (result.score is None) == (result.reason == "bad_gold")


PIECES = r"""
\frac { } ( ) [ ] ^ _ \sqrt x 1 2 10 9 ! \pm , = < \le + - * / \cup \infty & \\ \sum \int | \text{ cm % $ \pi i e
\log \sin \binom \lfloor \rfloor : \circ . \ldots \{ \} \bmod \pmod \overline and or \mathbb{R} ** ' ; ~
\begin{pmatrix} \end{pmatrix}
"""
MATH_TOKENS = PIECES.split()


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(MATH_TOKENS), max_size=25), st.lists(st.sampled_from(MATH_TOKENS), max_size=8))
def test_any_formula_gets_a_verdict(answer: list[str], gold: list[str]) -> None:
    text = " ".join(gold)
    assume(text.strip())
    assert grade(" ".join(answer), text).score in (0.0, 1.0, None)


def test_byte_strings() -> None:
    generator = random.Random(7)
    reasons = set()
    for _ in range(2_000):
        data = generator.randbytes(generator.randrange(80))
        text = data.decode("utf-8", generator.choice(["surrogateescape", "replace", "backslashreplace"]))
        box = generator.random() < 0.7
        response = rf"</think>\boxed{{{text}}}" if box else text
        result = grade_response(response, "5", answer_scope="after_think")
        assert result.score in (0.0, 1.0)
        reasons.add(result.reason)
    assert {"unparsable", "no_answer", "wrong"} <= reasons
