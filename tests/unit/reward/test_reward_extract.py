"""Extraction: the last box, outside the thinking, balanced, in linear time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate_grpo.reward.extract import extract_answer, last_box, resolve_scope


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{42}", "42"),
        (r"\fbox{42}", "42"),
        (r"a \boxed{1} b \boxed{2} c", "2"),
        (r"\boxed{1} and \fbox{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a } \} b}", r"\text{a } \} b"),
        (r"\boxed 5", "5"),
        (r"$\boxed 5$", "5"),
        (r"\boxed -5, so", "-5,"),
        (r"\boxed\frac{1}{2} done", r"\frac{1}{2}"),
        (r"\boxed  {5}", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{x \boxed{5}}", "5"),
        (r"\text{\boxed{42}}", "42"),
        (r"\\\boxed{5}", "5"),
        (r"\boxed{5", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{}", None),
        (r"\boxed{1} \boxed{ }", None),
        (r"\boxed", None),
        (r"boxed{42}", None),
        (r"\\boxed{42}", None),
        (r"\boxedfoo{42}", None),
        ("", None),
        ("the answer is 42", None),
    ],
)
def test_last_box(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


@pytest.mark.parametrize("scope", ["after_think", "whole"])
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> none", None),
        (r"a</think> \boxed{1} </think>", None),
        (r"<think>so \boxed{1}", None),
        (r"\boxed{1}</think>\boxed{2}<think>\boxed{3}", "2"),
    ],
)
def test_a_box_inside_thinking_never_pays(scope: str, response: str, expected: str | None) -> None:
    assert extract_answer(response, scope) == expected  # type: ignore[arg-type]


def test_scope_without_thinking() -> None:
    assert extract_answer(r"\boxed{1}", "whole") == "1"
    assert extract_answer(r"\boxed{1}", "after_think") is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "after_think"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "whole"),
        ("<|im_start|>assistant\n", "whole"),
        ("earlier </think> x <think>", "after_think"),
    ],
)
def test_auto_scope_is_what_the_template_says(prompt: str, expected: str) -> None:
    assert resolve_scope("auto", prompt) == expected
    assert resolve_scope("whole", prompt) == "whole"
    assert resolve_scope("after_think", prompt) == "after_think"


@given(st.text(alphabet="\\{}boxedf 5$<think/>", max_size=80))
def test_any_text_has_an_answer_that_is_part_of_it_or_none(text: str) -> None:
    for scope in ("after_think", "whole"):
        answer = extract_answer(text, scope)  # type: ignore[arg-type]
        assert answer is None or (answer and answer in text and answer == answer.strip())


@given(st.recursive(st.text("ab1+ ", max_size=5), lambda inner: st.builds("{{{}}}x{}".format, inner, inner)))
def test_balanced_content_comes_back_whole(content: str) -> None:
    assert last_box(rf"so \boxed{{{content}}} }} {{") == (content.strip() or None)


@pytest.mark.parametrize(
    "unit",
    [r"\boxed{5}", r"\boxed{", "{", "}", "\\", "<think>", "</think>", r"\boxed", r"\\boxed{5}", "\\" * 63 + "boxed"],
)
def test_linear_time(unit: str) -> None:
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        start = time.process_time()
        extract_answer(text, "whole")
        return time.process_time() - start

    seconds(100_000)
    # 8 times the text may not take 64 times as long; the constant covers what a clock cannot see.
    assert seconds(1_600_000) < 24 * seconds(200_000) + 0.1
