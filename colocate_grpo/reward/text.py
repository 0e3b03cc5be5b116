"""Answers in words: names, yes and no, and phrases that stand for a symbol."""

from __future__ import annotations

import re

from colocate_grpo.reward.normalise import compact
from colocate_grpo.reward.tokens import PLAIN_FUNCTIONS

_PHRASE = re.compile(
    r"(?P<text>\\text(?:bf|it|rm)?\{)?\s*(?:"
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?"
    r"(?:answer|solution)(?:\s+is)?\s*(?:[:=]\s*)?(?=[^a-z\s]|[a-j]\Z)"
    r"|(?:the\s+)?(?:points?|domain|range|interval|area|volume|length)\s*(?::\s*)?(?=[(\[{}$\\]|\d)"
    r"|(?:option|choice)\s+(?=[}A-J\\(])"
    r"|(?!(?:option|choice)\b|(?:[a-z]+ )*(?:not|wrong)\b)[a-z][a-z ]{2,40}:\s*(?=[-(\[{}$\\\d])"
    r"|(?:exactly|the\s[a-z ]{2,40}\s(?:is|are|equals))\s*(?=[-(\[{}$\\\d])"
    r"|\\(?:implies|[Rr]ightarrow)\s*"
    r"|(?:最终)?(?:答案|故?选(?!手|举|择))(?:是|为|选|项|：|:)*\s*)",
    re.IGNORECASE,
)
_MACRO = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|mathrm|mathbf|operatorname|emph)\s*(?=\{)")
_PUNCTUATION = re.compile(r"(?<![0-9])[.,]|[.,](?![0-9])|[;:?'\"(){}\[\]$]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")
_WORDS = re.compile(r"[^\W\d_](?:[^\W_]|[\s'.,;:?]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))*\Z")
_LETTERS = re.compile(r"[^\W\d_]+")
_MACRO_GROUP = re.compile(_MACRO.pattern.replace(r"(?=\{)", "") + r"\{([^{}]*)\}")
_AND = re.compile(r"(?:,\s*and\b|,|\band\b|\\text\{\s*and\s*\})")
_UNITS_PLACE = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER_WORDS = ["zero", *_UNITS_PLACE[1:], *_TEENS, *(f"{ten} {one}".strip() for ten in _TENS for one in _UNITS_PLACE)]
_SYNONYMS = {
    **dict.fromkeys(
        (
            "no solution",
            "no solutions",
            "empty set",
            "the empty set",
            "none exist",
            "no solution exists",
            "no solutions exist",
        ),
        r"\emptyset",
    ),
    **dict.fromkeys(
        ("no real solution", "no real solutions", "there are no solutions", "there is no solution"), r"\emptyset"
    ),
    **dict.fromkeys(("all real numbers", "all reals", "the real numbers", "real numbers"), r"\mathbb{R}"),
    **dict.fromkeys(("does not exist", "dne", "undefined", "not defined"), "undefined"),
    **dict.fromkeys(("infinity", "positive infinity"), r"\infty"),
    **dict.fromkeys(("negative infinity", "minus infinity"), r"-\infty"),
    **dict.fromkeys(("infinite", "infinitely many", "infinitely many solutions"), r"\infty"),
    **{word: str(value) for value, word in enumerate(_NUMBER_WORDS)},
    **{digit: str(value) for value, digit in enumerate("零一二三四五六七八九十")},
    **dict.fromkeys(("hundred", "one hundred", "a hundred"), "100"),
    **dict.fromkeys(("thousand", "one thousand", "a thousand"), "1000"),
}


def drop_phrases(text: str) -> str:
    """Without a leading `the answer is`, and with phrases such as `no solution` as symbols."""
    match = _PHRASE.match(text)
    if match and match.end() < len(text):
        text = (match["text"] or "") + text[match.end() :]
    if len(text) < 60 and (text[:1].isalpha() or text[:1] == "\\"):
        return _SYNONYMS.get(as_text(text), text)
    return text


def as_text(text: str) -> str:
    """Words of an answer for comparison: no macros, no punctuation, no article, one case.

    Operators and digits stay: `x - 1` is not `x + 1`.
    """
    words = _PUNCTUATION.sub(" ", _MACRO.sub(" ", text)).casefold().split()
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words)


def same_words(pred: str, gold: str) -> bool:
    """Whether both are the same words; a formula that happens to have the same letters is not words."""
    if (as_text(pred) != as_text(gold) and not _same_names(pred, gold)) or not _is_words(gold):
        return False
    # `abc` may be a product of symbols, which have a case.
    return len(gold) > 3 or gold.casefold() in ("yes", "no") or pred == gold


def _same_names(pred: str, gold: str) -> bool:
    """`Bob and Alice` are `Alice, Bob`."""
    if not all("and" in text or "," in text for text in (pred, gold)):
        return False
    given, wanted = (sorted(as_text(name) for name in _AND.split(text)) for text in (pred, gold))
    return len(wanted) > 1 and given == wanted


def same_letters(pred: str, gold: str) -> bool:
    """Whether only text macros and spaces differ: `5m` and `5\\text{ m}`."""
    return _unmacro(pred) == _unmacro(gold)


def _unmacro(text: str) -> str:
    return compact(_MACRO_GROUP.sub(r" \1 ", text)) if "\\" in text else compact(text)


def _is_words(text: str) -> bool:
    plain = _MACRO.sub("", text).replace("{", "").replace("}", "").strip().strip("()")
    if not _WORDS.match(plain):
        return False
    runs = [run for run in _LETTERS.findall(plain) if run not in PLAIN_FUNCTIONS]
    return any(len(run) >= 3 or not run.isascii() for run in runs) or plain.casefold() in ("no", "up")
