"""Find the answer of a response: the last box, outside the thinking. Linear time on any string."""

from __future__ import annotations

import re
from typing import Literal

Scope = Literal["after_think", "whole"]

OPEN, CLOSE = "<think>", "</think>"
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_END = re.compile(r"[\s$]|\\[)\]]|<\|")


def resolve_scope(scope: str, rendered_prompt: str) -> Scope:
    """Turn `auto` into a fixed scope, once a run, from one prompt as the chat template renders it.

    A template that leaves a `<think>` open makes every response start inside the thinking: a response
    without `</think>` then has no answer. Otherwise the response itself says where its thinking is.
    """
    assert scope in ("after_think", "whole", "auto"), scope
    if scope != "auto":
        return scope  # type: ignore[return-value]
    return "after_think" if rendered_prompt.rfind(OPEN) > rendered_prompt.rfind(CLOSE) else "whole"


def answer_region(response: str, scope: Scope) -> str | None:
    """The part of a response that may hold the answer, or None when the thinking never ended."""
    closed = response.rfind(CLOSE)
    if closed < 0 and scope == "after_think":
        return None
    region = response[closed + len(CLOSE) :] if closed >= 0 else response
    # A thinking block that is opened and not closed is thinking, in either scope.
    return region.split(OPEN, 1)[0]


def extract_answer(response: str, scope: Scope) -> str | None:
    """Content of the last `\\boxed` or `\\fbox` of the answer region; None when absent, unclosed or empty."""
    region = answer_region(response, scope)
    return None if region is None else last_box(region)


def last_box(text: str) -> str | None:
    """Content of the last box in `text`, stripped; None when there is none, or it is unclosed or empty."""
    start = _last_command(text)
    if start is None:
        return None
    while start < len(text) and text[start].isspace():
        start += 1
    content = _braced(text, start) if text[start : start + 1] == "{" else _unbraced(text, start)
    return content.strip() or None if content is not None else None


def _last_command(text: str) -> int | None:
    """Index just after the last `\\boxed` or `\\fbox` that is a command (`\\\\boxed` is a line break and a word)."""
    found = {name: text.rfind(name) for name in ("\\boxed", "\\fbox")}
    while True:
        # Each name is searched only below its own last place: linear in all.
        name, at = max(found.items(), key=lambda item: item[1])
        if at < 0:
            return None
        after = at + len(name)
        if not text[after : after + 1].isalpha() and _backslashes_before(text, at) % 2 == 0:
            return after
        found[name] = text.rfind(name, 0, at)


def _backslashes_before(text: str, at: int) -> int:
    head = text[max(0, at - 64) : at]
    return len(head) - len(head.rstrip("\\"))


def _braced(text: str, start: int) -> str | None:
    depth = 0
    for match in _BRACES.finditer(text, start):
        token = match.group()
        depth += (token == "{") - (token == "}")
        if depth == 0:
            return text[start + 1 : match.start()]
    return None


def _unbraced(text: str, start: int) -> str | None:
    """`\\boxed 5`: up to the first space or end of formula outside braces."""
    depth, at = 0, start
    while at < len(text):
        if depth == 0 and _UNBRACED_END.match(text, at):
            break
        char = text[at]
        at += 2 if char == "\\" else 1
        depth += (char == "{") - (char == "}")
    return text[start:at] if depth == 0 else None
