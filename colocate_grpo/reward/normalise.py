"""Clean one answer: one spelling of unicode, wrappers, spacing commands and thousands separators. Linear time."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SMALL_FRACTION = re.compile(f"([{''.join(_SUPERSCRIPTS)}]+)[⁄/∕]([{''.join(_SUBSCRIPTS)}]+)")
_SUPER_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUB_RUN = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒―﹣－", "-"),
    **dict.fromkeys("\x00\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u202a\u202b\u202c\u202d\u202e︎️\xad", ""),
    **dict.fromkeys("′’‘ʹ", "'"),
    **dict.fromkeys("“”„«»", '"'),
    **dict.fromkeys("、､", ", "),
    "，": ",",
    "✓": "",
    "º": r"^\circ ",
    "˚": r"^\circ ",
    "₹": r"\text{rupees }",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "÷": r"\div ",
    "∗": "*",
    "⁄": "/",
    "∕": "/",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≦": r"\le ",
    "≧": r"\ge ",
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "≃": r"\approx ",
    "≅": r"\cong ",
    "≡": r"\equiv ",
    "→": r"\to ",
    "∼": r"\sim ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "∞": r"\infty ",
    "°": r"^\circ ",
    "∘": r"\circ ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "∉": r"\notin ",
    "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "π": r"\pi ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "δ": r"\delta ",
    "ε": r"\epsilon ",
    "θ": r"\theta ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "ρ": r"\rho ",
    "σ": r"\sigma ",
    "τ": r"\tau ",
    "φ": r"\phi ",
    "ϕ": r"\phi ",
    "ω": r"\omega ",
    "Δ": r"\Delta ",
    "Ω": r"\Omega ",
    "Σ": r"\sum ",
    "∑": r"\sum ",
    "∫": r"\int ",
    "∏": r"\prod ",
    "…": r"\ldots ",
    "⋯": r"\ldots ",
    "∠": r"\angle ",
    "△": r"\triangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "〈": r"\langle ",
    "〉": r"\rangle ",
    "∶": ":",
    "：": ":",
    "；": ";",
    "。": ".",
    "∧": r"\land ",
    "∨": r"\lor ",
    "€": r"\euro ",
    "£": r"\pounds ",
    "¥": r"\yen ",
    "￥": r"\yen ",
    "¢": r"\text{ cents}",
    "％": "%",
}
_TABLE = str.maketrans(_SYMBOLS)

_SPACING = {"\\,", "\\;", "\\:", "\\>", "\\ ", "~", "\\quad", "\\qquad", "\\enspace", "\\thinspace", "\\/", "\\nobreak"}
_DROPPED = (
    "middle|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|bigg|Bigg|big|Big|displaystyle|textstyle"
    "|scriptstyle|scriptscriptstyle|limits|nolimits|strut|checkmark|hfill|rm|bf|it|boldmath|normalsize|large|Large|LARGE|huge|Huge|tiny|small"
    "|blacksquare|therefore"
)
_COMMAND = re.compile(
    rf"\\\\|\\(?:left|right)(?![a-zA-Z])\.?|\\(?:{_DROPPED})(?![a-zA-Z])|\\[,;:> !/]|~"
    r"|\\(?:qquad|quad|enspace|thinspace|nobreak)(?![a-zA-Z])"
    r"|\\[dtc]frac(?![a-zA-Z])|\\[dt]binom(?![a-zA-Z])|\\(?:leqslant|leq|le)(?![a-zA-Z])"
    r"|\\(?:geqslant|geq|ge)(?![a-zA-Z])|\\neq(?![a-zA-Z])"
)
_RENAMED = {r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\neq": r"\ne", r"\leqslant": r"\le", r"\leq": r"\le"}
_RENAMED |= {r"\geqslant": r"\ge", r"\geq": r"\ge", r"\le": r"\le", r"\ge": r"\ge"}
_RENAMED |= {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac"}

_WORD = r"\\(?:text|mathrm)\{ ?([a-zA-Z]+) ?\}"
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!|\\,)\s*(?:\\!)?\s*(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,/^_ ])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9/ ])")
_COMMA_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_FRACTION_OF_WORDS = re.compile(rf"\\frac\{{{_WORD}\}}\{{{_WORD}(\^\{{?[23]\}}?)?\}}")
_SYSTEM = re.compile(r"^(?:\\\{ ?)?\\begin\{(cases|aligned|array)\}(?:\{[lcr ]+\})?([^&]*)\\end\{\1\}$")
_ORDINALS = {"st": "1", "nd": "2", "rd": "3", "th": "0-9"}
# (what must occur, where exactly, what stands there instead): each pattern is linear in the text.
_REWRITES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("{}", re.compile(r"(?<![a-zA-Z^_}])\{\}"), ""),
    ("{.}", re.compile(r"\{\.\}"), "."),
    (":=", re.compile(":="), "="),
    ("{cases}", re.compile(r", ?&"), "&"),
    ("\\cr", re.compile(r"\\cr(?![a-zA-Z])"), r"\\\\"),
    ("\\\\[", re.compile(r"(\\\\)\[-?[0-9.]+ ?[a-z]{2}\]"), r"\1"),
    ("\\tag", re.compile(r"\\tag\*?\{[^{}]*\}"), ""),
    ("\\label", re.compile(r"\\label\{[^{}]*\}"), ""),
    ("space{", re.compile(r"\\[hv]space\*?\{[^{}]*\}"), " "),
    ("phantom{", re.compile(r"\\[hv]?phantom\{[^{}]*\}"), ""),
    ("{aligned}", re.compile(r"\\(?:begin|end)\{aligned\}"), ""),
    ("{equation", re.compile(r"\\(?:begin|end)\{equation\*?\}"), ""),
    ("\\boxed", re.compile(r"^\\boxed(?=[^{a-zA-Z])"), ""),
    ("\\over", re.compile(r"^([^{}\\]*)\\over(?![a-zA-Z])([^{}\\]*)$"), r"\\frac{\1}{\2}"),
    ("U", re.compile(r"(?:(?<=[)\]])|(?<=\\\})) ?(?:U|\\(?:text|mathrm)\{ ?U ?\}) ?(?=[\[({\\])"), r"\\cup "),
    ("**", re.compile(r"^\*\*([A-Za-z ]+:?)\*\*"), r"\1"),
    ("$", re.compile(r"(?<![\\$])\$(?! )([^$]*[^$ \\])\$(?![0-9$])"), r"\1"),
    ("Rs", re.compile(r"\bRs\.? ?(?=[0-9])"), r"\\text{rupees }"),
    ("(or ", re.compile(r"\(or ([^()]*)\)$"), r", \\text{or }\1"),
    # `k\pi (k \in \mathbb{Z})`
    ("\\in", re.compile(r"(?<=[^\\ ,])[ ,]*\(([a-zA-Z]) ?(\\in(?![a-z])[^()]*)\)$"), r", \1\2"),
    # `3rd`, `4^{th}`, `21^{\text{st}}`
    *(
        (suffix, re.compile(rf"(?<=[{digits}])(?:\^\{{?\\(?:text|mathrm)\{{{suffix}\}}\}}?|{suffix}\b)"), "")
        for suffix, digits in _ORDINALS.items()
    ),
    ("^{th}", re.compile(r"(?<=[0-9])\^\{th\}"), ""),
    # `\frac{\text{km}}{\text{h}}`
    ("\\frac{\\text{", _FRACTION_OF_WORDS, r"\\text{ \1/\2}\3"),
    ("\\frac{\\mathrm{", _FRACTION_OF_WORDS, r"\\text{ \1/\2}\3"),
)
_OVER = re.compile(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}")
_COLOR = re.compile(r"\\(?:text)?color\{[^{}]*\}")
_CLOCK = re.compile(r"(?<=[0-9{ ])([apAP])\.\s?[mM]\.?(?![a-zA-Z])")
_TEX_COMMENT = re.compile(r"^%[^\n]*\n", re.MULTILINE)
_SPACES = re.compile(r"(?<![0-9])\s+|\s+(?![0-9.])")
_TRAILING = ".,;:。 \t\r\n"
_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("`", "`"),
    ("{", "}"),
    ('"', '"'),
    ("__", "__"),
    ("*", "*"),
    ("''", "''"),
    ("'", "'"),
)
_WRAPPER_STARTS = {opening[0] for opening, _ in _WRAPPERS}
_MACRO_WRAPPERS: tuple[str, ...] = (
    r"\boxed{",
    r"\fbox{",
    r"\boldsymbol{",
    r"\mathbf{",
    r"\bm{",
    r"\displaystyle{",
    r"\mathit{",
)
_MACRO_WRAPPERS += (r"\ensuremath{", r"\mathsf{", r"\underline{", r"\mathbin{", r"\pmb{")


def clean(text: str) -> str:
    """One spelling for everything that does not change the meaning of an answer."""
    text = _unicode(text).strip()
    if text.startswith("%") or "\n%" in text:
        text = _TEX_COMMENT.sub("", text)
    if "\\" in text or "," in text:
        text = _THOUSANDS.sub("", text)
    if "\\" in text or "~" in text:
        text = _COMMAND.sub(_command, text)
    if " " in text:
        text = _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)
        text = _CLOCK.sub(r"\1m", text)
    if "{aligned}" in text:
        text = text.replace("&", "")
    if "\\begin" in text and (system := _SYSTEM.match(text)):
        text = _without_rows(system[2])
    for mark, pattern, instead in _REWRITES:
        if mark in text:
            text = pattern.sub(instead, text)
    if "{:}" in text or "{,}" in text:
        text = text.replace("{:}", ":").replace("{,}", ",")
    if "\\over" in text or "\\choose" in text:
        text = _OVER.sub(r"\\frac{\1}{\2}", text)
        text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    if "color" in text:
        text = _COLOR.sub("", text)
    return unwrap(text)


def _without_rows(system: str) -> str:
    """A system of equations without its brace, as a list."""
    return ", ".join(row for row in (row.strip(" ,;\n") for row in system.split("\\\\")) if row)


def _unicode(text: str) -> str:
    if text.isascii():
        return text.replace("\0", "")
    text = _SMALL_FRACTION.sub(lambda m: rf"\frac{{{_plain(m[1])}}}{{{_plain(m[2])}}}", text)
    text = _SUPER_RUN.sub(lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m.group()) + "}", text)
    text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m.group()) + "}", text)
    text = "".join(_vulgar(c) for c in text.translate(_TABLE))
    text = unicodedata.normalize("NFKC", text).translate(_TABLE)
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


def _plain(small: str) -> str:
    return unicodedata.normalize("NFKC", small).replace("−", "-")


def _vulgar(char: str) -> str:
    """`½` is `\\frac{1}{2}`: NFKC alone would turn `5½` into `51/2`."""
    if char.isascii() or unicodedata.category(char) != "No":
        return char
    top, slash, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}" if slash and bottom else char


def _command(match: re.Match[str]) -> str:
    token = match.group()
    if token in _SPACING:
        return " "
    if token == "\\\\":
        return token  # a row end: its second backslash starts no command
    return _RENAMED.get(token, "")


def unwrap(text: str) -> str:
    """Strip what may stand around an answer: math delimiters, boxes, bold, trailing punctuation."""
    for _ in range(8):
        before = text
        text = _strip_trailing(text.strip())
        for opening, closing in _WRAPPERS if text[:1] in _WRAPPER_STARTS else ():
            if _wraps(text, opening, closing):
                text = text[len(opening) : len(text) - len(closing)].strip()
        for macro in _MACRO_WRAPPERS if text[:1] == "\\" else ():
            if text.startswith(macro) and _closes_at_end(text, len(macro) - 1):
                text = text[len(macro) : -1].strip()
        if text == before:
            break
    return text


def _wraps(text: str, opening: str, closing: str) -> bool:
    if len(text) < len(opening) + len(closing) or not (text.startswith(opening) and text.endswith(closing)):
        return False
    if opening == "{":
        return _closes_at_end(text, 0)
    inner = text[len(opening) : len(text) - len(closing)]
    return closing not in (inner.replace("\\$", "") if closing[0] == "$" else inner)


def _closes_at_end(text: str, start: int) -> bool:
    """Whether the brace at `start` is closed by the last character."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        token = match.group()
        depth += (token == "{") - (token == "}")
        if depth == 0:
            return start + match.end() == len(text)
    return False


def _strip_trailing(text: str) -> str:
    stripped = text.rstrip(_TRAILING)
    if stripped.endswith("\\") and not stripped.endswith("\\\\"):
        stripped = stripped[:-1].rstrip(_TRAILING)
    while stripped.endswith("\\\\"):
        stripped = stripped[:-2].rstrip(_TRAILING)
    dots = text[len(stripped) :].strip()
    # An ellipsis is part of an answer, a full stop is not.
    return text if dots.startswith("..") else stripped


def join_thousands(text: str) -> str:
    """`1,234,567` as `1234567`; a list of three-digit numbers looks the same, so callers try both readings."""
    return _COMMA_THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def compact(text: str) -> str:
    """The text without white space, except between digits: the form in which two answers are called identical."""
    return _SPACES.sub("", text)
