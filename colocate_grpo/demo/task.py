"""The demo's task: sums of two-digit numbers, how a careless teacher works them, and which are held out."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

HELD_OUT = 256
GUESSES = (-20, -10, -2, -1, 0, 0, 1, 2, 10, 20)
SLIPS = (-2, -1, 1, 2)


@dataclass(frozen=True, order=True)
class Problem:
    """a + b."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a} + {self.b}? Put the answer in \\boxed{{}}."

    @property
    def label(self) -> str:
        return str(self.a + self.b)


@dataclass(frozen=True)
class Teacher:
    """Guesses without thinking with probability `guess`; else works digit by digit, each step wrong with `slip`."""

    guess: float = 0.0
    slip: float = 0.0

    def answer(self, problem: Problem, rng: random.Random) -> str:
        """A whole response, end token not included."""
        if rng.random() < self.guess:
            return response([], problem.a + problem.b + rng.choice(GUESSES))
        return self._worked(problem, rng)

    def _worked(self, problem: Problem, rng: random.Random) -> str:
        steps, result, carry, unit = [], 0, 0, 1
        while unit < 100:
            x, y = problem.a // unit % 10, problem.b // unit % 10
            total = x + y + carry
            if rng.random() < self.slip:
                total = max(0, total + rng.choice(SLIPS))
            steps.append(f"{x}+{y}+{carry}={total}")
            result += total % 10 * unit
            carry, unit = total // 10, unit * 10
        return response(steps, result + carry * unit)


def response(steps: list[str], result: int) -> str:
    """The form of every answer."""
    return "<think>\n" + "\n".join(steps) + f"\n</think>\n\n\\boxed{{{result}}}"


def split() -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems, chosen by hash; of a held-out sum, a + b and b + a are both kept from training."""
    pairs = [Problem(a, b) for a in range(10, 100) for b in range(a, 100)]
    pairs.sort(key=_digest)
    held_out = [p if _digest(p)[0] % 2 else Problem(p.b, p.a) for p in pairs[:HELD_OUT]]
    training = {q for p in pairs[HELD_OUT:] for q in (p, Problem(p.b, p.a))}
    return sorted(training, key=_digest), held_out


def _digest(problem: Problem) -> bytes:
    return hashlib.sha256(f"{problem.a}+{problem.b}".encode()).digest()
