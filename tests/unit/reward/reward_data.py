"""The labelled pairs, and a reward function for every way in which one can misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from colocate_grpo.trajectory import Verdict

DATA = Path(__file__).parents[2] / "data"
HOSTILE = {"dos", "bytes", "injection"}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def hang(task: Any) -> float:
    while task.response != "fine":
        time.sleep(0.01)
    return 1.0


def eat_memory(task: Any) -> float:
    return float(len([0] * (int(task.response) << 20)))


def leave(task: Any) -> float:
    if task.response == "leave":
        os._exit(3)
    return 1.0


def fail(task: Any) -> float:
    raise KeyError(task.response)


def chatter(task: Any) -> float:
    print("x" * 10_000)
    sys.stderr.write("")
    return 0.5


def divided_by_zero(task: Any) -> Any:
    return Verdict(float(task.response), "wrong", "0 / 0")


def shaped(task: Any) -> Verdict:
    return Verdict(-0.25, "correct", accuracy=1.0)


def no_objective(answer: str, gold: Any) -> float:
    return float("nan")


async def half(task: Any, scale: float = 1.0) -> float:
    await asyncio.sleep(0)
    return 0.5 * scale


def excluded(task: Any) -> None:
    return None


class Keeper:
    """A reward with a state: how often it was called, scaled."""

    def __init__(self, step: float) -> None:
        self.calls, self.step = 0, step

    def __call__(self, task: Any) -> float:
        self.calls += 1
        return self.calls * self.step


def is_square(answer: str, gold: Any) -> bool:
    return int(answer) ** 0.5 == gold


def count_items(answer: str, gold: Any) -> float | None:
    items = answer.split(",")
    return float(len(items)) if len(items) == len(set(items)) else None


def modules(task: Any) -> float:
    return float(any(name in sys.modules for name in ("torch", "megatron", "transformers")))
