"""Why every reward of a batch is the same: such a batch teaches nothing, and the cause is usually one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from colocate_grpo.reward.extract import CLOSE, OPEN
from colocate_grpo.trajectory import Verdict

_HINTS = {
    "correct": "every answer is right: the prompts are too easy for this model",
    "wrong": "every answer was read and is wrong: the prompts are too hard, or the gold answers are of another form",
    "truncated": "every response hit the token limit before its answer: raise the response length",
    "unparsable": "no box holds an expression: see the responses in the rollout dump",
    "timeout": "every answer ran into reward.timeout_s or the memory limit",
    "too_long": "every response is longer than reward.max_chars",
    "bad_gold": "the gold answers are empty or broken: run the data check",
    "error": "the reward function raised on every response",
}


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How often each reason occurs, the most frequent first; these are the metrics of a step."""
    return dict(Counter(verdict.reason for verdict in verdicts).most_common())


def explain_equal_rewards(verdicts: Sequence[Verdict], responses: Sequence[str]) -> str:
    """One line that says why all rewards are equal; empty when they are not, or when there are none."""
    scores = {verdict.score for verdict in verdicts}
    if len(scores) != 1:
        return ""
    score = scores.pop()
    counts = count_reasons(verdicts)
    shares = ", ".join(f"{100 * count / len(verdicts):.0f} % {reason}" for reason, count in counts.items())
    value = "excluded" if score is None else f"{score:g}"
    return f"all {len(verdicts)} rewards are {value}: {shares}; {_hint(next(iter(counts)), verdicts, responses)}"


def _hint(reason: str, verdicts: Sequence[Verdict], responses: Sequence[str]) -> str:
    if reason == "no_answer":
        return _no_answer_hint(responses)
    details = Counter(verdict.detail for verdict in verdicts if verdict.detail)
    example = f" (for example: {details.most_common(1)[0][0][:200]})" if details else ""
    return _HINTS.get(reason, "see the verdicts in the rollout dump") + example


def _no_answer_hint(responses: Sequence[str]) -> str:
    boxed = sum("\\boxed" in response or "\\fbox" in response for response in responses)
    closed = sum(CLOSE in response for response in responses)
    opened = sum(OPEN in response for response in responses)
    if not closed and (opened or boxed):
        return f"no {CLOSE} in any response"
    if not boxed:
        return "no \\boxed in any response: does the prompt ask for a box?"
    return f"{boxed} of {len(responses)} responses have a \\boxed, but none after {CLOSE} that is closed and not empty"
