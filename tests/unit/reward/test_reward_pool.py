"""The pool: limits, kills, replacement, and that nothing of an answer is ever executed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_data import HOSTILE, rows

from colocate_grpo.errors import ConfigError
from colocate_grpo.reward.pool import Pending, RewardPool, RewardTask
from colocate_grpo.trajectory import Verdict

LIMIT_S = 1.0
SCOPE = {"answer_scope": "after_think"}


def make(function: str, options: dict[str, Any] | None = None, workers: int = 1, **limits: Any) -> RewardPool:
    limits = {"timeout_s": 20.0, "memory_limit_mb": 1024, "max_chars": 200_000} | limits
    return RewardPool(function, options or {}, workers, **limits)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with make("math_boxed", SCOPE, workers=2, timeout_s=LIMIT_S) as started:
        yield started


def submit(pool: RewardPool, row: dict[str, Any]) -> Pending:
    if "pred" in row:
        return pool.submit_answer(row["pred"], row["gold"])
    return pool.submit(RewardTask(row["response"], row["gold"]))


def wait_for_full_strength(pool: RewardPool, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while pool.strength < pool.workers + 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert pool.strength == pool.workers + 1


def boxed(answer: str, gold: Any) -> RewardTask:
    return RewardTask(rf"</think>\boxed{{{answer}}}", gold)


# -- math ------------------------------------------------------------------------------------------------------
def test_hostile_inputs_in_a_row_leave_the_pool_at_full_strength(pool: RewardPool) -> None:
    data = [row for row in rows("grading/cases.jsonl") if row["kind"] in HOSTILE | {"hack", "bug"}]
    assert len(data) >= 81
    for row in data:
        wait_for_full_strength(pool)
        start = time.monotonic()
        verdict = submit(pool, row).result(timeout=60)
        assert time.monotonic() - start < 2.5, row
        assert (verdict.score == 1.0) == bool(row["expected"]), row
    wait_for_full_strength(pool)
    assert pool.submit_answer(r"\frac{1}{2}", "0.5").result(timeout=60).reason == "correct"


def test_nothing_in_an_answer_is_executed(pool: RewardPool, tmp_path: Path) -> None:
    target = tmp_path / "pwned"
    command = f"__import__('os').system('touch {target}')"
    payloads = [
        *(command, f"\\pi if {command} else 1", f"sympify({command!r})", f"\\text{{{command}}}", f"{{{{{command}}}}}"),
        *(
            f"\\begin{{pmatrix}} {command} \\end{{pmatrix}}",
            f"open('{target}','w')",
            f"eval({command!r})",
            f"$({command})",
        ),
        *(
            f"`touch {target}`",
            f"$(touch {target})",
            f"x={command}",
            f"\\write18{{touch {target}}}",
            f"\\input|touch {target}",
        ),
        f"lambda: {command}",
    ]
    for payload in payloads:
        for answer, gold in (
            (payload, "42"),
            (payload, r"\frac{1}{2}"),
            (payload, "x+1"),
            ("x+1", payload),
            (payload, "Monday"),
        ):
            assert pool.submit_answer(answer, gold).result(timeout=60).score != 1.0
    for row in rows("grading/cases.jsonl"):
        if "pwned" in str(row):
            submit(pool, row).result(timeout=60)
    assert not target.exists()
    assert list(Path("/tmp").glob("pwned_*")) == []


def test_ten_thousand_byte_strings_through_the_pool(pool: RewardPool) -> None:
    generator = random.Random(11)
    texts = [generator.randbytes(generator.randrange(60)).decode("utf-8", "surrogateescape") for _ in range(10_000)]
    golds = ["5", r"\frac{1}{2}", "x+1", "(1,2)"]
    verdicts = pool.grade_many([boxed(text, golds[index % 4]) for index, text in enumerate(texts)])
    assert len(verdicts) == 10_000
    assert {verdict.score for verdict in verdicts} == {0.0}
    wait_for_full_strength(pool)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 190_000,
        "\\" * 190_000,
        "\ud800" * 1000,
        "\0" * 1000,
        "(" * 100_000 + ")" * 90_000,
        "^" * 190_000,
        "1," * 90_000,
    ],
)
def test_large_and_strange_answers(pool: RewardPool, text: str) -> None:
    for gold in ("5", "x+1"):
        assert pool.submit_answer(text, gold).result(timeout=60).score == 0.0


def test_sympy_decides_what_the_evaluator_cannot() -> None:
    cases = [
        (r"\int_0^1 2x\,dx", "1", "correct"),
        (r"\int_0^1 2x\,dx", "2", "wrong"),
        (r"\lim_{x \to 0} \frac{\sin x}{x}", "1", "correct"),
        (r"\lim_{x \to 0} \frac{\sin x}{x}", "0", "wrong"),
        (r"\sum_{k=1}^{\infty} \frac{1}{k^2}", r"\frac{\pi^2}{6}", "correct"),
    ]
    with make("math_boxed", SCOPE) as patient:  # how fast sympy is on this machine, is no question here
        assert [patient.submit_answer(a, gold).result(timeout=60).reason for a, gold, _ in cases] == [
            reason for *_, reason in cases
        ]


def test_statuses_and_limits(pool: RewardPool) -> None:
    tasks = [
        RewardTask(r"<think> \boxed{5}", "5", status="truncated"),
        RewardTask(r"<think> \boxed{5}", "5"),
        RewardTask(r"</think> \boxed{5}", "5", status="truncated"),
        RewardTask("x" * 200_001, "5"),
        RewardTask(r"</think> \boxed{5}", ""),
    ]
    assert [v.reason for v in pool.grade_many(tasks)] == ["truncated", "no_answer", "correct", "too_long", "bad_gold"]


def test_many_at_once_from_one_loop_in_order(pool: RewardPool) -> None:
    tasks = [boxed(rf"\frac{{{2 * i}}}{{{i % 7 + 1}}}", rf"\frac{{{2 * i}}}{{{i % 5 + 1}}}") for i in range(1, 120)]

    async def run() -> tuple[list[float | None], float]:
        longest, last = 0.0, time.thread_time()
        pending = asyncio.gather(*(pool.grade(task) for task in tasks))
        while not pending.done():
            await asyncio.sleep(0)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        return [verdict.score for verdict in await pending], longest

    scores, longest = asyncio.run(run())
    assert scores == [float(i % 7 == i % 5) for i in range(1, 120)]
    # CPU time of the loop's own thread between two turns: grading does not sit in it.
    assert longest < 0.5


def test_integers_never_reach_a_worker() -> None:
    unstarted = make("math_boxed", SCOPE)
    assert [v.score for v in unstarted.grade_many([boxed("5", "5"), boxed("6", 5), boxed("1/2", "0.5")])] == [
        1.0,
        0.0,
        1.0,
    ]
    with pytest.raises(AssertionError, match="not started"):
        unstarted.submit(boxed("x", "y"))


# -- limits ----------------------------------------------------------------------------------------------------
def test_a_hung_worker_is_killed_and_replaced() -> None:
    with make("reward_data:hang", timeout_s=LIMIT_S) as pool:
        wait_for_full_strength(pool)
        before = {worker.process.pid for worker in pool._crew}
        start = time.monotonic()
        verdicts = pool.grade_many([RewardTask("hang", 1), RewardTask("fine", 1)])
        # The second is graded by the spare: no wait for the start of an interpreter.
        assert time.monotonic() - start < LIMIT_S + 2.5
        assert [(v.score, v.reason) for v in verdicts] == [(0.0, "timeout"), (1.0, "correct")]
        wait_for_full_strength(pool)
        after = {worker.process.pid for worker in pool._crew}
        assert len(before & after) == len(after) - 1
        gone = next(iter(before - after))
        assert not Path(f"/proc/{gone}").exists()


def test_memory_is_limited() -> None:
    with make("reward_data:eat_memory", memory_limit_mb=600) as pool:
        hungry, modest = pool.grade_many([RewardTask("2000", 1), RewardTask("1", 1)])
        assert (hungry.score, hungry.reason) == (0.0, "timeout")
        assert "MemoryError" in hungry.detail
        assert modest.score == float(1 << 20)


def test_a_worker_that_dies_costs_one_verdict() -> None:
    with make("reward_data:leave") as pool:
        assert [v.reason for v in pool.grade_many([RewardTask("leave", 1), RewardTask("stay", 1)])] == [
            "timeout",
            "correct",
        ]
        wait_for_full_strength(pool)


def test_stop_ends_the_workers_and_answers_everyone() -> None:
    pool = make("reward_data:hang")
    pool.start()
    pids = [worker.process.pid for worker in pool._crew]
    pending = [pool.submit(RewardTask("hang", 1)) for _ in range(3)]
    pool.stop()
    assert [future.result(timeout=5).score for future in pending] == [None] * 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    pool.stop()


# -- other functions -------------------------------------------------------------------------------------------
def test_workers_import_neither_torch_nor_megatron() -> None:
    with make("reward_data:modules") as pool:
        assert pool.grade_many([RewardTask("", 1)])[0].score == 0.0


def test_user_functions() -> None:
    expected = {
        "reward_data:chatter": (0.5, "wrong"),
        "reward_data:half": (0.5, "wrong"),
        "reward_data:excluded": (None, "excluded"),
        "reward_data:fail": (None, "error"),
    }
    for name, wanted in expected.items():
        with make(name) as pool:
            verdict = pool.grade_many([RewardTask("text", {"any": "gold"})])[0]
            assert (verdict.score, verdict.reason) == wanted
    assert verdict.detail == "KeyError: 'text'"
    with make("reward_data:shaped") as pool:
        assert pool.grade_many([RewardTask("", 1)]) == [Verdict(-0.25, "correct", accuracy=1.0)]


def test_a_class_is_made_once_a_worker_with_its_options() -> None:
    with make("reward_data:Keeper", {"step": 0.25}) as pool:
        assert [v.score for v in pool.grade_many([RewardTask("", 1)] * 3)] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("math_bxed", {}, "did you mean math_boxed"),
        ("no.such.module:f", {}, "cannot be imported"),
        ("reward_data:hnag", {}, "did you mean hang"),
        ("reward_data:DATA", {}, "not a function or class"),
        ("reward_data:Keeper", {"stp": 1}, "stp"),
        ("math_boxed", {"answer_scope": "auto"}, "allowed: after_think, whole"),
    ],
)
def test_a_wrong_function_is_one_line_before_anything_runs(
    function: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error, make(function, options):
        pass
    assert "\n" not in str(error.value)


def test_a_cancelled_task_harms_no_other() -> None:
    async def run(pool: RewardPool) -> list[float | None]:
        slow = asyncio.ensure_future(pool.grade(RewardTask("hang", 1)))
        waiting = asyncio.ensure_future(pool.grade(RewardTask("hang", 1)))
        await asyncio.sleep(0.1)
        slow.cancel()
        waiting.cancel()
        return [(await pool.grade(RewardTask("fine", 1))).score for _ in range(2)]

    with make("reward_data:hang", timeout_s=LIMIT_S) as pool:
        assert asyncio.run(run(pool)) == [1.0, 1.0]


def test_workers_that_die_at_start_end_the_pool_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ConfigError, match="die at start"), make("math_boxed"):
        pass
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(ConfigError, match="cannot start a reward worker"), make("math_boxed"):
        pass


def test_a_job_queued_while_the_thread_wakes_up_does_not_silence_it() -> None:
    """Another caller comes at the worst moment: just before the thread reads the byte that woke it."""
    with make("math_boxed", SCOPE) as pool:
        pool._wake_read = WokenWhileReading(pool, pool._wake_read)  # type: ignore[assignment]
        for _ in range(3):
            assert pool.submit(boxed("sqrt(8)", r"2\sqrt{2}")).result(timeout=60).score == 1.0


class WokenWhileReading:
    """The reading end of the pool's socket pair, on which somebody always wakes the thread once more."""

    def __init__(self, pool: RewardPool, socket: Any) -> None:
        self.pool, self.socket = pool, socket

    def recv(self, size: int) -> bytes:
        self.pool._wake()
        return self.socket.recv(size)

    def close(self) -> None:
        self.socket.close()
