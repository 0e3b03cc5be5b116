"""Properties that hold for every number, expression and byte string."""

from __future__ import annotations

import math
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


@SLOW_MACHINE
@given(st.integers(0, 99), st.text("0123456789", max_size=3), st.text("0123456789", min_size=1, max_size=6))
def test_repeating_decimals_are_fractions(whole: int, head: str, block: str) -> None:
    scale, nines = 10 ** len(head), 10 ** len(block) - 1
    value = whole + Fraction(int(head or "0"), scale) + Fraction(int(block), nines * scale)
    start, gold = f"{whole}.{head}", latex(value)
    dotted = rf"\dot{{{block[0]}}}{block[1:-1]}" + (rf"\dot{{{block[-1]}}}" if len(block) > 1 else "")
    for form in (rf"\overline{{{block}}}", dotted, block * 3 + "...", block * 4 + r"\ldots"):
        assert right(start + form, gold), form
    assert right(start + block, gold) == (int(block) == 0)
    assert not right(start + rf"\overline{{{block}}}", latex(value + Fraction(1, 10**13)))


@SLOW_MACHINE
@given(fractions, fractions)
def test_a_computation_is_its_result_when_it_is_true(a: Fraction, b: Fraction) -> None:
    assert right(f"{latex(a)} + ({latex(b)}) = {latex(a + b)}", latex(a + b))
    assert not right(f"{latex(a)} + ({latex(b)}) = {latex(a + b + 1)}", latex(a + b + 1))
    assert not right(f"{latex(a)} = {latex(a)}", latex(a))


@SLOW_MACHINE
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6), st.integers(30, 200))
def test_zeros_of_sine_and_cosine(turns: int, factor: int, digits: int) -> None:
    assert right(rf"\sin({turns}\pi)", "0")
    assert right(rf"{factor}\cos({turns}\pi + \frac{{\pi}}{{2}})", "0")
    assert not right(rf"\sin({turns}\pi + 10^{{-{digits}}})", "0")


@SLOW_MACHINE
@given(st.integers(1, 40), st.data())
def test_combinations_in_every_notation(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    value = math.comb(n, k)
    for form in (rf"\binom{{{n}}}{{{k}}}", rf"C_{{{n}}}^{{{k}}}", f"C({n},{k})"):
        assert right(form, str(value)), form
        assert not right(form, str(value + 1))
    assert right(rf"A_{{{n}}}^{{{k}}}", str(math.perm(n, k)))


@SLOW_MACHINE
@given(st.integers(0, 20), st.integers(1, 11))
def test_compound_lengths(feet: int, inches: int) -> None:
    assert right(f"{feet} ft {inches} in", rf"{12 * feet + inches}\text{{ inches}}")
    assert not right(f"{feet} ft {inches} in", rf"{12 * feet + inches + 1}\text{{ inches}}")


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
