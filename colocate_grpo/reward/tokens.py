"""Cut a cleaned answer into tokens. One regular expression, linear time, a bound on their number."""

from __future__ import annotations

import re
from typing import NamedTuple

from colocate_grpo.reward.units import UNITS

MAX_TOKENS = 12_000


class ParseError(Exception):
    """The answer is not in the grammar: it can only be compared as text."""


class Token(NamedTuple):
    kind: str  # num, cmd, let, word, op, end
    text: str
    spaced: bool = False  # white space stands before it


def words(text: str) -> frozenset[str]:
    """The words of a text: how the tables of names are written down."""
    return frozenset(text.split())


END = Token("end", "")

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<num>[0-9]+\.[0-9]+|\.[0-9]+|[0-9]+)"
    r"|\\(?P<cmd>[a-zA-Z]+)\*?"
    r"|(?P<letters>[a-zA-Z]+)"
    r"|(?P<op>\\\\|\\[{}|%$&#_]|\*\*|<=|>=|!=|\.\.\.+|[-+*/^_=<>!(){}\[\],;:|%$&'.?])"
    r"|(?P<cjk>[和或且]|(?:(?![和或且])[\u3400-\u9fff\uac00-\ud7a3\u3040-\u30ff])+)"
)
_TEXT_MACROS = {"text", "mbox", "textbf", "textit", "textrm", "textnormal", "textsf", "hbox", "mathrm", "operatorname"}
_TEXT_MACROS |= {"rm", "texttt", "textup", "emph", "textsc"}
_PLAIN_MACROS = {"mathbf", "boldsymbol", "bm", "mathit", "mathsf", "mathtt", "mathcal", "vec", "mathfrak", "mathscr"}

PLAIN_FUNCTIONS = words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh asin acos atan"
    " log ln lg exp sqrt cbrt gcd lcm binom abs floor ceil frac det sgn cis"
)
_PLAIN_CONSTANTS = {
    "pi": "pi",
    "Pi": "pi",
    "PI": "pi",
    "infinity": "infty",
    "inf": "infty",
    "oo": "infty",
    "infty": "infty",
    "Infinity": "infty",
    "INFINITY": "infty",
    "theta": "theta",
    "alpha": "alpha",
    "beta": "beta",
    "cup": "cup",
    "mod": "bmod",
    "lambda": "lambda",
    "union": "cup",
    "times": "times",
}
KEYWORDS = {
    "to",
    "am",
    "pm",
    "and",
    "or",
    "percent",
    "square",
    "sq",
    "cubic",
    "per",
    "if",
    "for",
    "where",
    "units",
    "unit",
    "base",
}
_ALIASES = {"leqq": "le", "geqq": "ge", "empty": "emptyset", "lt": "<", "gt": ">", "ldotp": "ldots"}
_JOINTS = {"和": "and", "且": "and", "或": "or"}
_BRACKETS = {"lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")"}
_RELATIONS = {"<=": "le", ">=": "ge", "!=": "ne", "leq": "le", "geq": "ge", "neq": "ne", "lt": "<", "gt": ">"}


def tokenize(text: str) -> list[Token]:
    """Tokens of a cleaned answer; ParseError on a character outside the grammar or too many tokens."""
    tokens: list[Token] = []
    _scan(text, tokens, in_text=False, depth=0)
    while tokens and tokens[-1].kind == "op" and tokens[-1].text in (".", ",", ";"):
        tokens.pop()
    return tokens


def _scan(text: str, out: list[Token], in_text: bool, depth: int) -> None:
    at, spaced, size = 0, in_text, len(text)
    while at < size:
        match = _TOKEN.match(text, at)
        if match is None or len(out) > MAX_TOKENS:
            raise ParseError("too long" if match else f"character {text[at]!r}")
        at = match.end()
        kind = match.lastgroup
        value = match[kind]  # type: ignore[index]
        if kind == "space" or (in_text and value == "$"):
            spaced = True
            continue
        if kind == "cmd" and (value in _TEXT_MACROS or value in _PLAIN_MACROS):
            at = _scan_macro(text, at, value, out, depth)
        elif kind == "letters":
            _letters(value, spaced, out, in_text)
        else:
            out.append(_simple(kind, value, spaced))
        spaced = False


def _simple(kind: str | None, value: str, spaced: bool) -> Token:
    if kind == "num":
        return Token("num", value, spaced)
    if kind == "cmd":
        if value in _BRACKETS:
            return Token("op", _BRACKETS[value], spaced)
        return Token("cmd", _RELATIONS.get(value, _ALIASES.get(value, value)), spaced)
    if kind == "cjk":
        return Token("word", _JOINTS.get(value, value), spaced)
    if value in _RELATIONS:
        return Token("cmd", _RELATIONS[value], spaced)
    return Token("cmd", "ldots", spaced) if value.startswith("..") else Token("op", value, spaced)


def _scan_macro(text: str, at: int, name: str, out: list[Token], depth: int) -> int:
    """Tokens of the argument of `\\text{..}` or `\\mathbf{..}` in place of the macro; returns where to go on."""
    while at < len(text) and text[at] == " ":
        at += 1
    if text[at : at + 1] != "{" or depth > 8:
        return at
    end = _closing(text, at)
    inner = text[at + 1 : end]
    if name in _PLAIN_MACROS:
        out.append(Token("op", "{"))
        _scan(inner, out, in_text=False, depth=depth + 1)
        out.append(Token("op", "}"))
    else:
        _scan(inner, out, in_text=True, depth=depth + 1)
    return end + 1


def _closing(text: str, at: int) -> int:
    level = 0
    for match in re.finditer(r"\\.|[{}]", text[at:], re.DOTALL):
        level += (match.group() == "{") - (match.group() == "}")
        if level == 0:
            return at + match.start()
    raise ParseError("unclosed brace")


def _letters(run: str, spaced: bool, out: list[Token], in_text: bool) -> None:
    """A run of letters is a function, a constant, a word (unit, text), or a product of one-letter symbols."""
    after_number = bool(out) and out[-1].kind == "num"
    lower = run.lower()
    if len(run) > 1 and (run in PLAIN_FUNCTIONS) and not (in_text and run in UNITS):
        out.append(Token("cmd", run, spaced))
    elif run in _PLAIN_CONSTANTS:
        out.append(Token("cmd", _PLAIN_CONSTANTS[run], spaced))
    elif (
        lower in KEYWORDS
        or len(run) >= 4
        or _is_unit(run, spaced, after_number)
        or (_is_text(run, out) if in_text else _goes_on(run, spaced, out))
    ):
        out.append(Token("word", run, spaced))
    else:
        out.extend(Token("let", letter, spaced and index == 0) for index, letter in enumerate(run))


def _is_unit(run: str, spaced: bool, after_number: bool) -> bool:
    if run not in UNITS and run.lower() not in UNITS:
        return False
    return len(run) >= 3 or (after_number and (len(run) == 2 or spaced))


def _after_value(out: list[Token]) -> bool:
    if len(out) > 1 and out[-1].text == "cdot":  # `m \\cdot s^{-1}`
        return out[-2].kind == "word"
    return bool(out) and (out[-1].kind in ("num", "word") or out[-1].text in (")", "}", "]", "^", "/", "pi"))


def _is_text(run: str, out: list[Token]) -> bool:
    """Inside `\\text{..}` one letter is a symbol, or a unit after a value."""
    return len(run) > 1 or (run in UNITS and _after_value(out))


def _goes_on(run: str, spaced: bool, out: list[Token]) -> bool:
    """`12 years old`, `7 way`: short words are text only after other words or a number."""
    if not (spaced and out) or len(run) < 2:
        return False
    return out[-1].kind == "word" or (out[-1].kind == "num" and len(run) == 3)
