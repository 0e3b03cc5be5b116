"""Answers in words: names, yes and no, and phrases that stand for a symbol."""

from __future__ import annotations

import re

_PHRASE = re.compile(
    r"(?P<text>\\text(?:bf|it|rm)?\{)?\s*(?:"
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?"
    r"(?:answer|solution)(?:\s+is)?\s*[:=]?\s*(?=[^a-z\s])"
    r"|(?:option|choice)\s+(?=[}A-J\\(])"
    r"|(?:最终)?答案(?:是|为|：|:)*\s*)",
    re.IGNORECASE,
)
_MACRO = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|mathrm|mathbf|operatorname|emph)\s*(?=\{)")
_PUNCTUATION = re.compile(r"[.,;:?'\"(){}\[\]$]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'.,;:?()]|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))*\Z")
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


def is_words(text: str) -> bool:
    """Whether an answer is words, and not a formula that happens to have the same letters."""
    plain = _MACRO.sub("", text).replace("{", "").replace("}", "").strip().strip("()")
    return bool(_WORDS.match(plain)) and (len(plain) >= 3 or not plain.isascii() or plain.casefold() in ("no", "up"))
