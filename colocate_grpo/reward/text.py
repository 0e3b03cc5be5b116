"""Answers in words: names, yes and no, and phrases that stand for a symbol."""

from __future__ import annotations

import re

from colocate_grpo.reward.normalise import compact
from colocate_grpo.reward.tokens import PLAIN_FUNCTIONS

_PHRASE = re.compile(
    r"(?P<text>\\text(?:bf|it|rm)?\{)?\s*(?:"
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?"
    r"(?:answer|solution)(?:\s+is)?\s*[:=]?\s*(?=[^a-z\s])"
    r"|(?:option|choice)\s+(?=[}A-J\\(])"
    r"|(?:最终)?答案(?:是|为|：|:)*\s*)",
    re.IGNORECASE,
)
_MACRO = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|mathrm|mathbf|operatorname|emph)\s*(?=\{)")
_PUNCTUATION = re.compile(r"(?<![0-9])[.,]|[.,](?![0-9])|[;:?'\"(){}\[\]$]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")
_WORDS = re.compile(r"[^\W\d_](?:[^\W_]|[\s'.,;:?]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))*\Z")
_LETTERS = re.compile(r"[^\W\d_]+")
_MACRO_GROUP = re.compile(_MACRO.pattern.replace(r"(?=\{)", "") + r"\{([^{}]*)\}")
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SYNONYMS = {
    **dict.fromkeys(("no solution", "no solutions", "empty set", "the empty set", "none exist"), r"\emptyset"),
    **dict.fromkeys(("no real solution", "no real solutions", "there are no solutions"), r"\emptyset"),
    **dict.fromkeys(("all real numbers", "all reals", "the real numbers", "real numbers"), r"\mathbb{R}"),
    **dict.fromkeys(("does not exist", "dne", "undefined", "not defined"), "undefined"),
    **dict.fromkeys(("infinity", "positive infinity"), r"\infty"),
    **dict.fromkeys(("negative infinity", "minus infinity"), r"-\infty"),
    **{word: str(value) for value, word in enumerate(_NUMBER_WORDS)},
    "eleven": "11",
    "twelve": "12",
    "fifteen": "15",
    "twenty": "20",
    "hundred": "100",
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
    if as_text(pred) != as_text(gold) or not _is_words(gold):
        return False
    # `abc` may be a product of symbols, which have a case.
    return len(gold) > 3 or gold.casefold() in ("yes", "no") or pred == gold


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
