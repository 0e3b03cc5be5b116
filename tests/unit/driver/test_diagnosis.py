"""Causes of death, from what real endings leave behind."""

from __future__ import annotations

from typing import Any

import pytest

from colocate_grpo.diagnosis import Ending, diagnose

TORCHRUN = """
E1129 20:45:32.4 2415 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
STATE = {"step": 7, "phase": "train"}
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 3 has a total capacity of 23.65 GiB "
    "of which 1.04 GiB is free."
)


def of(
    report: dict[str, Any] | None = None, log: str = "", code: int = 1, kills: int = 0, state: Any = STATE
) -> Ending:
    return diagnose(report, code, log + TORCHRUN.format(code=code), state, kills)


@pytest.mark.parametrize("kind", ["finished", "stopped", "user_error", "guard_stop", "rollback"])
def test_what_the_loop_says_of_a_deliberate_end_is_believed(kind: str) -> None:
    ending = of({"kind": kind, "message": "said", "step": 9}, log=OOM)
    assert (ending.kind, ending.message, ending.step) == (kind, "said", 9)
    assert not ending.retried


@pytest.mark.parametrize(
    ("phase", "option"),
    [
        ("train", "train.max_tokens_per_microbatch"),
        ("rollout", "rollout.sglang.mem_fraction_static"),
        ("push", "rollout.bucket_mib"),
        ("start", "colocate-grpo plan"),
    ],
)
def test_gpu_memory_names_phase_amount_and_option(phase: str, option: str) -> None:
    for report in (None, {"kind": "oom", "message": OOM}, {"kind": "crash", "message": "a collective failed"}):
        ending = of(report, log=f"Traceback\n{OOM}\n", state={"step": 7, "phase": phase})
        assert ending.kind == "oom"
        assert f"phase {phase}, step 7 while asking for 2.32 GiB" in ending.message
        assert option in ending.message
        assert not ending.retried


RECORD = "2026-11-29 20:44:31,804 rank 0 {} colocate_grpo.rollout: {}\n"
HANDLED = RECORD.format("WARNING", f"engine 1 was lost: Traceback (most recent call last):\n  File ...\n{OOM}")
ANSWER = RECORD.format("INFO", f"step 7, an answer: 'Traceback of my thoughts: {OOM}'")
WENT_ON = RECORD.format("INFO", "memory train: allocated=1.00GiB")
FAILURE = "Traceback (most recent call last):\n  File ...\nValueError: bad\n"


@pytest.mark.parametrize("earlier", [HANDLED + WENT_ON, ANSWER, HANDLED + ANSWER])
def test_a_handled_loss_or_an_answer_that_speaks_of_memory_is_no_cause(earlier: str) -> None:
    endings = [of(log=earlier, code=-9), of(log=earlier + FAILURE), of({"kind": "crash", "message": "x"}, earlier)]
    assert [(ending.kind, ending.retried) for ending in endings] == [("crash", True)] * 3
    assert of(log=earlier + f"Traceback (most recent call last):\n  File ...\n{OOM}\n").kind == "oom"


def test_sigkill_leaves_no_traceback_so_what_stands_there_is_older() -> None:
    assert of(log=HANDLED, code=-9).retried


def test_the_kernel_s_memory_killer_is_told_from_another_sigkill() -> None:
    killed = of(code=-9, kills=1)
    assert (killed.kind, killed.retried) == ("oom", False)
    assert "memory.backup_dir" in killed.message
    other = of(code=-9)
    assert (other.kind, other.retried) == ("crash", True)
    assert "signal 9 (phase train, step 7)" in other.message
    assert of(code=1, kills=1).kind == "crash", "somebody else's process was ended for memory"


def test_a_crash_without_a_report_names_the_exception() -> None:
    log = "Traceback (most recent call last):\n  File ...\nImportError: libcuda.so.1: cannot open shared object file\n"
    assert of(log=log, state={}).message.startswith(
        "ImportError: libcuda.so.1: cannot open shared object file (phase start"
    )
    assert of(log="[rank1]: ValueError: bad\n").message.startswith("ValueError: bad")


def test_an_engine_s_end_is_retried() -> None:
    assert of({"kind": "engine", "message": "all engines are dead"}).retried


def test_exit_codes() -> None:
    codes = {kind: Ending(kind, "").exit_code for kind in ("finished", "stopped", "user_error", "oom", "interrupted")}  # type: ignore[arg-type]
    assert codes == {"finished": 0, "stopped": 0, "user_error": 2, "oom": 1, "interrupted": 130}
