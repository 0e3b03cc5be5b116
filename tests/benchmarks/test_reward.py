"""Speed of the reward, and side by side with math-verify in the same run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import math_verify

from colocate_grpo.reward.grade import grade
from colocate_grpo.reward.pool import Pending, RewardPool, RewardTask

DATA = Path(__file__).parents[1] / "data"
HOSTILE = {"dos", "bytes", "injection"}


def rows() -> list[dict[str, Any]]:
    lines = (DATA / "grading" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] not in HOSTILE]


def process_seconds(pid: int) -> float:
    """CPU time of a process, to the nanosecond (`/proc/PID/schedstat`)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def test_mean_cpu_time_of_an_answer() -> None:
    """One warm worker, parent and worker together, over the cases that are not hostile: 1/25 of math-verify's time.

    That is some 0.25 ms where math-verify takes 6 ms. In turns, the best of each: other load only adds.
    """
    data = rows()
    theirs = [row for row in data if "pred" in row][::9]
    with RewardPool("math_boxed", {"answer_scope": "after_think"}, 1, 20.0, 1024, 200_000) as pool:

        def submit(row: dict[str, Any]) -> Pending:
            if "pred" in row:
                return pool.submit_answer(row["pred"], row["gold"])
            return pool.submit(RewardTask(row["response"], row["gold"]))

        def seconds() -> float:
            pids = [worker.process.pid for worker in pool._crew]
            start = time.process_time() + sum(map(process_seconds, pids))
            for future in [submit(row) for row in data]:
                future.result(timeout=60)
            return time.process_time() + sum(map(process_seconds, pids)) - start

        while pool.strength < 2:  # the spare's start is no part of an answer
            time.sleep(0.05)
        taken: dict[str, list[float]] = {"here": [], "math-verify": []}
        best = {"here": 1.0, "math-verify": 1.0}
        seconds()
        mean_seconds(math_verify_says, theirs)
        while len(taken["here"]) < 5 or (len(taken["here"]) < 15 and 25 * best["here"] > best["math-verify"]):
            taken["here"].append(seconds() / len(data))
            taken["math-verify"].append(mean_seconds(math_verify_says, theirs)[0])
            best = {name: min(values) for name, values in taken.items()}
    print({name: f"{1000 * value:.3f} ms of CPU an answer" for name, value in best.items()})
    assert 25 * best["here"] <= best["math-verify"]


def test_a_batch_of_long_responses_with_integer_golds() -> None:
    text = "<think>" + "so x = 12 and \\frac{3}{4} \\boxed{7} {" * 500 + "</think> The answer is $\\boxed{%d}$."
    tasks = [RewardTask((text % index)[-16_000:], str(index)) for index in range(256)]
    assert all(len(task.response) == 16_000 for task in tasks)
    pool = RewardPool("math_boxed", {"answer_scope": "after_think"}, 1, 2.0, 1024, 200_000)
    taken = []
    for _ in range(3):  # a pause of the interpreter or of the machine only adds
        start = time.thread_time()
        verdicts = pool.grade_many(tasks)
        taken.append(time.thread_time() - start)
        assert {verdict.reason for verdict in verdicts} == {"correct"}
    print(f"256 responses in {min(taken):.4f} s of CPU")
    assert min(taken) <= 0.1


def math_verify_says(pred: str, gold: str) -> bool:
    parsed = [math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=2) for text in (gold, pred)]
    return bool(math_verify.verify(*parsed, timeout_seconds=2))


def mean_seconds(judge: Callable[[str, str], bool], data: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Mean CPU seconds, share of agreement, and false positives."""
    taken, agreed, false_positives = [], 0, 0
    for row in data:
        start = time.thread_time()
        good = judge(row["pred"], str(row["gold"]))
        taken.append(time.thread_time() - start)
        agreed += good == bool(row["expected"])
        false_positives += good and not row["expected"]
    return statistics.mean(taken), agreed / len(data), false_positives


def test_side_by_side_with_math_verify() -> None:
    """The same pairs, in one process, the prediction and the gold each in a box for math-verify."""

    def ours(pred: str, gold: str) -> bool:
        return grade(pred, gold).score == 1.0

    # Every third row: theirs takes some 10 ms each.
    data = [row for row in rows() if "pred" in row][::3]
    math_verify_says("1", "1")
    their_time, their_agreement, their_positives = mean_seconds(math_verify_says, data)
    our_time, our_agreement, our_positives = mean_seconds(ours, data)
    print(
        f"{len(data)} pairs: math-verify {1000 * their_time:.2f} ms, {100 * their_agreement:.1f} %, "
        f"{their_positives} false positives; here {1000 * our_time:.3f} ms, {100 * our_agreement:.1f} %, "
        f"{our_positives} false positives; {their_time / our_time:.0f} times faster"
    )
    assert our_time * 5 < their_time
    assert our_agreement > their_agreement
    assert our_positives == 0
