"""A worker process of the pool: one request, one reply, until the socket closes.

Started as a fresh interpreter (`python -m colocate_grpo.reward.worker FD`), so that it has no copy of the
trainer's memory, threads or CUDA context. It imports neither torch nor Megatron.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from colocate_grpo.errors import UserError
from colocate_grpo.reward.builtin import BUILTIN, load_reward, run_reward
from colocate_grpo.reward.channel import Reader, encode
from colocate_grpo.reward.grade import compare_texts
from colocate_grpo.reward.task import RewardTask
from colocate_grpo.trajectory import Verdict

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests from the socket whose descriptor is the first argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _isolate()
    messages = _messages(connection)
    setup = next(messages)
    try:
        handle = _prepare(setup)
    except UserError as error:
        connection.sendall(encode({"failed": str(error)}))
        return
    connection.sendall(encode({"ready": True}))
    for message in messages:
        connection.sendall(encode(_reply(handle, message)))


def _isolate() -> None:
    """Die with the parent, write no core files, and keep what a reward function prints off the terminal's stdout."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(2, 1)


def _messages(connection: socket.socket) -> Any:
    reader = Reader()
    while True:
        data = connection.recv(1 << 16)
        if not data:
            return
        yield from reader.feed(data)


def _prepare(setup: dict[str, Any]) -> Callable[[dict[str, Any]], Verdict]:
    """Import everything before the first request: the time limit is for answers, not for imports."""
    reward = load_reward(setup["function"], setup["options"])
    if setup["function"] in BUILTIN:
        import sympy

        sympy.simplify(sympy.Symbol("x") * 1)
    limit = setup["memory_limit_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.setrecursionlimit(3_000)

    def handle(message: dict[str, Any]) -> Verdict:
        if "texts" in message:
            return compare_texts(*message["texts"], symbolic=True)
        return run_reward(reward, RewardTask(**message["task"]))

    return handle


def _reply(handle: Callable[[dict[str, Any]], Verdict], message: dict[str, Any]) -> dict[str, Any]:
    try:
        verdict = handle(message)
    except (MemoryError, RecursionError) as error:
        return {"score": 0.0, "reason": "timeout", "detail": f"{type(error).__name__} in the worker"}
    except Exception as error:  # a reward function of the user may raise anything; the run must go on
        detail = f"{type(error).__name__}: {error}"
        return {"score": None, "reason": "error", "detail": detail[:2000]}
    return {**vars(verdict), "detail": verdict.detail[:2000]}


if __name__ == "__main__":
    main()
