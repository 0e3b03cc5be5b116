"""Reward functions by name: the built-in ones, their composition, and `package.module:name`.

A reward function is called with a `RewardTask` (and its options) and returns a score, None (excluded) or a
`Verdict`; it may be a coroutine function, or a class that is made once with the options and then called.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from colocate_grpo.errors import ConfigError, nearest
from colocate_grpo.reward.extract import extract_answer
from colocate_grpo.reward.grade import NO_ANSWER, TOO_LONG, compare_texts, quick_grade
from colocate_grpo.reward.task import RewardTask
from colocate_grpo.trajectory import Verdict

Reward = Callable[[RewardTask], Any]

_FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


class MathBoxed:
    """1 when the last box equals the gold answer, else 0."""

    def __init__(self, answer_scope: str = "whole", max_chars: int = 200_000) -> None:
        if answer_scope not in ("after_think", "whole"):
            raise ConfigError(f"reward.options.answer_scope: {answer_scope!r}; allowed: after_think, whole")
        self.scope, self.max_chars = answer_scope, max_chars

    def extract(self, task: RewardTask) -> str | None:
        return extract_answer(task.response, self.scope)  # type: ignore[arg-type]

    def quick(self, task: RewardTask) -> Verdict | tuple[str, str]:
        """The verdict where it needs no parser (linear time), else the cleaned answer and gold."""
        if len(task.response) > self.max_chars:
            return TOO_LONG
        found = quick_grade(self.extract(task), task.gold)
        return _cut_off(task) if found is NO_ANSWER else found

    def __call__(self, task: RewardTask) -> Verdict:
        found = self.quick(task)
        return found if isinstance(found, Verdict) else compare_texts(*found, symbolic=True)


def _cut_off(task: RewardTask) -> Verdict:
    """No answer at the token limit is another matter than no answer at all."""
    return Verdict(0.0, "truncated") if task.status == "truncated" else NO_ANSWER


class _Checked:
    """Base of rewards whose answer is an object that a function of the user checks."""

    def __init__(self, checker: str, source: str = "box", answer_scope: str = "whole") -> None:
        if source not in ("box", "fence"):
            raise ConfigError(f"reward.options.source: {source!r}; allowed: box, fence")
        self.check = import_object(checker, "reward.options.checker")
        self.source, self.scope = source, answer_scope

    def answer(self, task: RewardTask) -> str | None:
        if self.source == "box":
            return extract_answer(task.response, self.scope)  # type: ignore[arg-type]
        fences = _FENCE.findall(task.response)
        return fences[-1].strip() or None if fences else None


class Construct(_Checked):
    """1 when `checker(answer, gold)` accepts the object that was asked for, else 0."""

    def __call__(self, task: RewardTask) -> Verdict:
        answer = self.answer(task)
        if answer is None:
            return _cut_off(task)
        return Verdict(1.0, "correct") if self.check(answer, task.gold) else Verdict(0.0, "wrong")


class Optimize(_Checked):
    """0 when invalid, else 0.1 + 0.9 x progress from `baseline` to `target`, clipped to 0..1.

    `checker(answer, gold)` gives the objective, or None for an invalid object. Baseline and target come from
    the options, or a row at a time from a gold of the form `{"baseline": 10, "target": 25}`.
    """

    def __init__(self, checker: str, target: float | None = None, baseline: float = 0.0, **options: Any) -> None:
        super().__init__(checker, **options)
        self.target, self.baseline = target, baseline

    def __call__(self, task: RewardTask) -> Verdict:
        bounds = self._bounds(task.gold)
        if bounds is None:
            return Verdict(None, "bad_gold", "no target, or the same target and baseline")
        answer = self.answer(task)
        if answer is None:
            return _cut_off(task)
        value = self.check(answer, task.gold)
        if value is None:
            return Verdict(0.0, "wrong", "invalid")
        if math.isnan(float(value)):
            return Verdict(None, "error", "the checker's objective is nan")
        progress = (float(value) - bounds[0]) / (bounds[1] - bounds[0])
        score = 0.1 + 0.9 * min(1.0, max(0.0, progress))
        return Verdict(score, "correct" if progress >= 1.0 else "wrong", f"objective {value}")

    def _bounds(self, gold: Any) -> tuple[float, float] | None:
        row = gold if isinstance(gold, dict) else {}
        target = row.get("target", self.target)
        baseline = row.get("baseline", self.baseline)
        return None if target is None or target == baseline else (float(baseline), float(target))


class SoftOverlong:
    """DAPO's soft penalty: 0 up to `max_tokens - cache` tokens, then linearly down to -1 at `max_tokens`."""

    def __init__(self, cache: int, max_tokens: int | None = None) -> None:
        if cache <= 0:
            raise ConfigError(f"reward.options.cache: {cache}; allowed: a positive number of tokens")
        self.cache, self.max_tokens = cache, max_tokens

    def __call__(self, task: RewardTask) -> float:
        free = (self.max_tokens or task.max_tokens) - self.cache
        return -min(1.0, max(0.0, (task.response_tokens - free) / self.cache))


class Weighted:
    """Weighted sum of rewards. Excluded when any part is excluded.

    Reason and accuracy are those of the first part that judges the answer and not its length.
    """

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        if not parts:
            raise ConfigError("reward.options.parts: empty; allowed: a list of {function, weight, options}")
        self.parts = [(float(p.get("weight", 1.0)), load_reward(p["function"], p.get("options", {}))) for p in parts]
        judges = [i for i, (_, reward) in enumerate(self.parts) if not isinstance(reward, SoftOverlong)]
        self.judge = judges[0] if judges else 0

    async def __call__(self, task: RewardTask) -> Verdict:
        verdicts = [as_verdict(await _awaited(reward(task))) for _, reward in self.parts]
        detail = "; ".join(f"{v.reason} {v.score} {v.detail}".strip() for v in verdicts)
        if any(verdict.score is None for verdict in verdicts):
            return Verdict(None, next(v.reason for v in verdicts if v.score is None), detail)
        total = sum(weight * (v.score or 0.0) for (weight, _), v in zip(self.parts, verdicts, strict=True))
        judged = verdicts[self.judge]
        accuracy = judged.score if judged.accuracy is None else judged.accuracy
        return Verdict(total, judged.reason, detail, accuracy)


BUILTIN: dict[str, type] = {
    "math_boxed": MathBoxed,
    "construct": Construct,
    "optimize": Optimize,
    "soft_overlong": SoftOverlong,
    "weighted": Weighted,
}


_READS_A_BOX = ("math_boxed", "construct", "optimize")


def load_reward(function: str, options: dict[str, Any]) -> Reward:
    """The reward callable of a configuration; ConfigError names what is wrong with it."""
    found: Any = BUILTIN.get(function) or import_object(function, "reward.function")
    if not callable(found):
        raise ConfigError(f"reward.function: {function} is a {type(found).__name__}, not a function or class")
    if not inspect.isclass(found):
        return partial(found, **options) if options else found
    try:
        reward: Any = found(**options)
    except TypeError as error:  # unknown or missing option names
        raise ConfigError(f"reward.options of {function}: {error}") from error
    return reward


def with_answer_scope(function: str, options: dict[str, Any], scope: str) -> dict[str, Any]:
    """Options with the resolved `reward.answer_scope` for the built-in rewards that read a box, parts included."""
    if function == "weighted":
        parts = [
            part | {"options": with_answer_scope(part["function"], part.get("options", {}), scope)}
            for part in options.get("parts", [])
        ]
        return options | {"parts": parts}
    return {"answer_scope": scope} | options if function in _READS_A_BOX else options


def import_object(path: str, key: str) -> Any:
    """The object `package.module:name`; ConfigError with the nearest name when there is none."""
    module_name, _, name = path.partition(":")
    if not name:
        hint = nearest(path, BUILTIN)
        raise ConfigError(f"{key}: {path!r}; allowed: {', '.join(BUILTIN)} or package.module:name{hint}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}: {path!r} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}: {module_name} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def run_reward(reward: Reward, task: RewardTask) -> Verdict:
    """Call a sync or async reward and turn what it returns into a verdict."""
    value = reward(task)
    return as_verdict(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)


def as_verdict(value: Any) -> Verdict:
    """A score as a verdict: 1 or more is `correct`, None is excluded, and what is no finite number an error."""
    if value is None:
        return Verdict(None, "excluded")
    if not isinstance(value, Verdict):
        value = Verdict(float(value), "correct" if float(value) >= 1.0 else "wrong")
    score, accuracy = (None if x is None else float(x) for x in (value.score, value.accuracy))
    for name, number in (("score", score), ("accuracy", accuracy)):
        if number is not None and not math.isfinite(number):
            return Verdict(
                None, "error", f"the reward's {name} is {number}, not a finite number {value.detail}".strip()
            )
    return Verdict(score, str(value.reason), str(value.detail), accuracy)
