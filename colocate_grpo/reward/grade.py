"""From a response and a gold answer to a verdict. Pure functions; pool.py bounds what they may cost."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

from colocate_grpo.reward.compare import same_answer
from colocate_grpo.reward.evaluate import Evaluator, NeedPrecision, Number, Undecided, Undefined, is_exact
from colocate_grpo.reward.extract import Scope, extract_answer, last_box
from colocate_grpo.reward.node import Node, symbols
from colocate_grpo.reward.normalise import clean, compact, join_thousands, unwrap
from colocate_grpo.reward.rational import is_rounding, parse_rational, significant_digits
from colocate_grpo.reward.structure import parse_answer
from colocate_grpo.reward.symbolic import needs_symbolic, same_symbolic
from colocate_grpo.reward.text import drop_phrases, same_letters, same_words
from colocate_grpo.reward.tokens import ParseError
from colocate_grpo.trajectory import Verdict

MAX_ANSWER_CHARS = 200_000
_QUALIFIER = re.compile(r"(?<=\S)\s*(?:,\s*)?\\text\{\s*[,(]?\s*(?:for|where|with|because|since|(?:is|are) the only)\b")
_NAMED = re.compile(
    r"(?!.*(?:\\(?:ne|le|ge|approx|not|sim)(?![a-z])|\bnot\b))[^=<>,?!]{1,60}=([^=<>]+)\Z"
)  # `\mathbb{E}[X] = 5`
MIN_ROUNDED_DIGITS = 12  # a decimal with this many digits may stand for a fraction that does not end

CORRECT, WRONG = Verdict(1.0, "correct"), Verdict(0.0, "wrong")
NO_ANSWER = Verdict(0.0, "no_answer")
TOO_LONG = Verdict(0.0, "too_long")


class BadGold(Exception):
    """The gold answer of a data row cannot be compared with anything."""


def grade_response(response: str, gold: Any, *, answer_scope: Scope, max_chars: int = MAX_ANSWER_CHARS) -> Verdict:
    """Verdict on a whole model output: extraction, then `grade`."""
    if len(response) > max_chars:
        return TOO_LONG
    return grade(extract_answer(response, answer_scope), gold)


def grade(answer: str | None, gold: Any, *, symbolic: bool = False) -> Verdict:
    """Verdict on the content of a box (None: there is no box). A gold that is no answer gives no score.

    `symbolic` lets sympy try what is still undecided; it may never return, so only workers set it.
    """
    found = quick_grade(answer, gold)
    return found if isinstance(found, Verdict) else compare_texts(*found, symbolic=symbolic)


def quick_grade(answer: str | None, gold: Any) -> Verdict | tuple[str, str]:
    """The verdict where it needs no parser: identical text, plain numbers, bad input. Linear time.

    Otherwise the cleaned texts of answer and gold, for `compare_texts`.
    """
    try:
        wanted = gold_text(gold)
    except BadGold as error:
        return Verdict(None, "bad_gold", str(error))
    if answer is None or not answer.strip():
        return NO_ANSWER
    if len(answer) > MAX_ANSWER_CHARS:
        return TOO_LONG
    given = prepare(answer)
    left, right = compact(given), compact(wanted)
    if left == right:
        return CORRECT
    pred_value, gold_value = parse_rational(left), parse_rational(right)
    if pred_value is None or gold_value is None:
        return given, wanted
    return CORRECT if pred_value == gold_value or _is_rounded(left, right, pred_value, gold_value) else WRONG


def _is_rounded(left: str, right: str, pred_value: Number, gold_value: Number) -> bool:
    for literal, other, value in ((left, right, gold_value), (right, left, pred_value)):
        if significant_digits(literal) >= MIN_ROUNDED_DIGITS and not significant_digits(other):
            return _never_ends(value) and is_rounding(literal, value)
    return False


def _never_ends(value: Number) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom != 1


def prepare(answer: str) -> str:
    """The cleaned text of an answer, without a leading "the answer is"."""
    text = clean(answer)
    shorter = drop_phrases(text)
    return text if shorter == text else unwrap(shorter)


def gold_text(gold: Any) -> str:
    """The cleaned text of a gold answer; BadGold when the data row has none."""
    if isinstance(gold, str):
        return _clean_gold(gold)
    if isinstance(gold, bool) or not isinstance(gold, (int, float)):
        raise BadGold(f"gold is a {type(gold).__name__}")
    if isinstance(gold, float):
        if not math.isfinite(gold):
            raise BadGold(f"gold is {gold}")
        return str(int(gold)) if gold.is_integer() else _decimal(gold)
    return str(gold)


def _decimal(gold: float) -> str:
    return format(gold, "f") if "e" in repr(gold) else repr(gold)


@lru_cache(maxsize=65536)
def _clean_gold(gold: str) -> str:
    boxed = last_box(gold) if "\\boxed" in gold or "\\fbox" in gold else gold
    text = prepare(boxed or "")
    if not text.strip("$ "):
        raise BadGold("gold is empty")
    if not _balanced(text):
        raise BadGold(f"gold has unbalanced braces: {text[:80]}")
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


# -- parsed answers --------------------------------------------------------------------------------------------
def compare_texts(pred: str, gold: str, *, symbolic: bool = False) -> Verdict:
    """Verdict on two cleaned texts that are neither identical nor both plain numbers."""
    if same_letters(pred, gold) or same_words(pred, gold):
        return CORRECT
    if _too_many_items(pred, gold):
        return WRONG
    wanted, given = _readings(gold), _readings(pred)
    if not wanted:
        return WRONG
    if not given:
        return Verdict(0.0, "unparsable")
    undecided = ""
    for left, right in _pairs(given, wanted):
        try:
            if same_answer(left, right) or _rounds(pred, gold, left, right):
                return CORRECT
        except Undecided as error:
            if symbolic and needs_symbolic(left, right) and _same_symbolic(left, right):
                return CORRECT
            undecided = f"undecided: {error}"
    return Verdict(0.0, "wrong", undecided)


def _too_many_items(pred: str, gold: str) -> bool:
    """A list of everything that is possible needs no parser to be told from a short gold."""
    return pred.count(",") > 60 and join_thousands(pred).count(",") > 3 * gold.count(",") + 60


def _same_symbolic(left: Node, right: Node) -> bool:
    try:
        return same_symbolic(left, right)
    except Exception:  # sympy raises nearly anything on hard input, and then nothing has been shown
        return False


def _pairs(given: list[Node], wanted: list[Node]) -> list[tuple[Node, Node]]:
    return [(left, right) for left in given for right in wanted]


def _readings(text: str) -> list[Node]:
    """Trees of an answer: `1,234` is a number, and failing that a list; `2n \\text{ for all } n` is `2n`."""
    readings = dict.fromkeys((join_thousands(text), text))
    trees = [tree for reading in readings if (tree := _tree(reading)) is not None]
    if not trees and (match := _QUALIFIER.search(text)):
        return _readings(text[: match.start()].rstrip(" ,;"))
    if not trees and (match := _NAMED.match(text)):
        return [tree for tree in _readings(match[1]) if not symbols(tree)]
    return trees


def _tree(text: str) -> Node | None:
    return _cached_tree(text) if len(text) <= 400 else _parsed(text)


def _parsed(text: str) -> Node | None:
    try:
        return parse_answer(text)
    except ParseError:
        return None


_cached_tree = lru_cache(maxsize=8192)(_parsed)


def _rounds(pred: str, gold: str, left: Node, right: Node) -> bool:
    """A long decimal against a fraction that is written as an expression."""
    for literal, tree in ((compact(pred), right), (compact(gold), left)):
        if significant_digits(literal) >= MIN_ROUNDED_DIGITS:
            value = _rational_value(tree)
            return value is not None and _never_ends(value) and is_rounding(literal, value)
    return False


def _rational_value(tree: Node) -> Number | None:
    try:
        value = Evaluator({}, 256).value(tree)
    except (Undefined, NeedPrecision, Undecided):
        return None
    return value if is_exact(value) else None
