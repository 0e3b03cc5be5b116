"""The reward pool: verdicts from worker processes that are killed when late and replaced by a warm spare.

One thread runs all workers with a selector. What needs no parser is decided at once in the calling thread.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from colocate_grpo.errors import ConfigError
from colocate_grpo.reward.builtin import MathBoxed, load_reward
from colocate_grpo.reward.channel import MAX_REPLY, Reader, encode
from colocate_grpo.reward.grade import TOO_LONG, quick_grade
from colocate_grpo.reward.task import RewardTask
from colocate_grpo.trajectory import Verdict

__all__ = ["RewardPool", "RewardTask"]

START_LIMIT_S = 120.0  # a fresh interpreter with its imports, on a machine that is busy with other things
MAX_FAILED_STARTS = 5


class Pending(Future):  # type: ignore[type-arg]
    """A verdict to come; `seconds` is the time that the worker took."""

    seconds = 0.0


@dataclasses.dataclass
class _Job:
    message: bytes
    future: Pending


class _Worker:
    """One process and its socket; `job` is set while it works, `deadline` while it works or starts."""

    def __init__(self, setup: bytes) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "colocate_grpo.reward.worker", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # A session of its own: an interrupt at the terminal is for the run, which then ends its workers.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        self.socket.setblocking(False)
        self.reader = Reader(MAX_REPLY)
        self.unsent = bytearray(setup)
        self.waits_to_send = True
        self.ready = False
        self.job: _Job | None = None
        self.started = time.monotonic()
        self.deadline: float | None = self.started + START_LIMIT_S

    def kill(self) -> None:
        self.socket.close()
        # By its id: the group has only this worker and what it started itself.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class RewardPool:
    """Grades responses in `workers` processes, at most `timeout_s` seconds and `memory_limit_mb` MiB each.

    `function` is a built-in name or `package.module:name`; `options` are passed to it. Responses of more than
    `max_chars` characters are `too_long`. `start` raises ConfigError when the function cannot be loaded.
    """

    def __init__(
        self,
        function: str,
        options: dict[str, Any],
        workers: int,
        timeout_s: float,
        memory_limit_mb: int,
        max_chars: int,
    ) -> None:
        self.workers, self.timeout_s, self.max_chars = workers, timeout_s, max_chars
        self._setup = encode({"function": function, "options": options, "memory_limit_mb": memory_limit_mb})
        reward = load_reward(function, options) if function == "math_boxed" else None
        self._math = reward if isinstance(reward, MathBoxed) else None
        self._jobs: collections.deque[_Job] = collections.deque()
        self._crew: list[_Worker] = []
        self._failed_starts = 0
        self._failure: str | None = None
        self._stopping = False
        self._woken = False
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()

    # -- life --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the workers and a spare; returns when `workers` of them are ready."""
        assert self._thread is None, "started twice"
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            failure = self._failure
            self.stop()
            raise ConfigError(failure)

    def stop(self) -> None:
        """Kill the workers; verdicts that are still awaited become excluded ones. May be called twice."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake()
        self._thread.join()
        self._thread = None
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def strength(self) -> int:
        """Number of live workers, the spare included; `workers + 1` at full strength."""
        return sum(worker.ready and worker.process.poll() is None for worker in list(self._crew))

    # -- grading -----------------------------------------------------------------------------------------------
    async def grade(self, task: RewardTask) -> Verdict:
        """Verdict on one response; many may be awaited at the same time."""
        future = self.submit(task)
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def grade_many(self, tasks: Sequence[RewardTask]) -> list[Verdict]:
        """Verdicts in the order of the tasks."""
        return [future.result() for future in [self.submit(task) for task in tasks]]

    def submit(self, task: RewardTask) -> Pending:
        """The verdict to come of one task."""
        if len(task.response) > self.max_chars:
            return _done(TOO_LONG)
        if self._math is None:
            return self._enqueue({"task": dataclasses.asdict(task)})
        return self._texts(self._math.quick(task))

    def submit_answer(self, answer: str | None, gold: Any) -> Pending:
        """The verdict to come of the bare content of a box."""
        too_long = answer is not None and len(answer) > self.max_chars
        return self._texts(TOO_LONG if too_long else quick_grade(answer, gold))

    def _texts(self, found: Verdict | tuple[str, str]) -> Pending:
        return _done(found) if isinstance(found, Verdict) else self._enqueue({"texts": found})

    def _enqueue(self, message: dict[str, Any]) -> Pending:
        assert self._thread is not None, "the pool is not started"
        assert self._thread.is_alive(), "the thread of the pool has ended"
        job = _Job(encode(message), Pending())
        self._jobs.append(job)
        self._wake()
        return job.future

    def _wake(self) -> None:
        # One byte is enough until the thread has read it.
        if not self._woken:
            self._woken = True
            self._wake_write.send(b"!")

    # -- the thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stopping:
                self._recruit()
                self._dispatch()
                for key, events in self._selector.select(self._wait()):
                    self._handle(key.data, events)
                self._expire()
        finally:
            # Whatever ended the thread, nobody may wait for a verdict that does not come.
            self._failure = self._failure or "the reward pool was stopped"
            for worker in list(self._crew):
                self._dismiss(worker, Verdict(None, "error", self._failure))
            self._refuse_all(self._failure)
            self._ready.set()

    def _recruit(self) -> None:
        while len(self._crew) <= self.workers and self._failure is None:
            try:
                worker = _Worker(self._setup)
            except OSError as error:  # no memory or no process left on this machine
                self._start_failed(f"cannot start a reward worker: {error}")
                continue
            self._crew.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _dispatch(self) -> None:
        if self._failure is not None:
            self._refuse_all(self._failure)
        idle = [worker for worker in self._crew if worker.ready and worker.job is None]
        free = self.workers - sum(worker.job is not None for worker in self._crew)
        for worker in idle[: max(0, free)]:
            job = self._next_job()
            if job is None:
                break
            self._give(worker, job)

    def _next_job(self) -> _Job | None:
        """The oldest job that nobody has cancelled; it cannot be cancelled any more."""
        while self._jobs:
            job = self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                return job
        return None

    def _give(self, worker: _Worker, job: _Job) -> None:
        worker.job, worker.started = job, time.monotonic()
        worker.deadline = worker.started + self.timeout_s
        worker.unsent += job.message
        self._send(worker)

    def _send(self, worker: _Worker) -> None:
        try:
            sent = worker.socket.send(worker.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return self._dismiss(worker, Verdict(0.0, "timeout", "the worker died"))
        del worker.unsent[:sent]
        if bool(worker.unsent) != worker.waits_to_send:
            worker.waits_to_send = bool(worker.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
            self._selector.modify(worker.socket, events, worker)
        return None

    def _wait(self) -> float | None:
        deadlines = [worker.deadline for worker in self._crew if worker.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _handle(self, worker: _Worker | None, events: int) -> None:
        if worker is None:
            # The byte first: with the flag cleared before, a byte sent in between would be read here as well, the flag
            # would stay set, and nobody could wake the thread again. What is queued until the flag falls is seen next.
            self._wake_read.recv(1 << 16)
            self._woken = False
            return
        if worker not in self._crew:
            return
        if events & selectors.EVENT_READ:
            self._receive(worker)
        elif events & selectors.EVENT_WRITE:
            self._send(worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            data = worker.socket.recv(1 << 16)
            messages = worker.reader.feed(data)
        except (OSError, ValueError):  # reset by a dying worker, or bytes that are no reply
            data, messages = b"", []
        for message in messages:
            self._reply(worker, message)
        if not data and worker in self._crew:
            self._dismiss(worker, Verdict(0.0, "timeout", "the worker died (memory limit?)"))

    def _reply(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._failure = message["failed"]
            self._ready.set()
        elif worker.job is None:
            self._failed_starts = 0
            worker.ready, worker.deadline = True, None
            if sum(other.ready for other in self._crew) >= self.workers:
                self._ready.set()
        else:
            self._finish(worker, Verdict(**message))

    def _finish(self, worker: _Worker, verdict: Verdict) -> None:
        job, worker.job, worker.deadline = worker.job, None, None
        if job is not None:
            job.future.seconds = time.monotonic() - worker.started
            job.future.set_result(verdict)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._crew if w.deadline is not None and w.deadline <= now]:
            self._dismiss(worker, Verdict(0.0, "timeout", f"over {self.timeout_s:g} s"))

    def _dismiss(self, worker: _Worker, verdict: Verdict) -> None:
        """End a worker; its job, if any, gets the verdict. `_recruit` starts the next one."""
        self._crew.remove(worker)
        self._selector.unregister(worker.socket)
        worker.kill()
        if not worker.ready:
            self._start_failed(f"reward workers die at start (exit code {worker.process.returncode})")
        self._finish(worker, verdict)

    def _start_failed(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS and not self._stopping:
            self._failure = self._failure or why
            self._ready.set()

    def _refuse_all(self, why: str) -> None:
        while self._jobs:
            future = self._jobs.popleft().future
            if future.set_running_or_notify_cancel():
                future.set_result(Verdict(None, "error", why))


def _done(verdict: Verdict) -> Pending:
    future = Pending()
    future.set_result(verdict)
    return future
