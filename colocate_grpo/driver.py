"""The supervisor of a run of many days: attempts, their causes of death, and what follows from each.

It holds no CUDA context and trains nothing. An attempt is one torchrun; between attempts nothing of the run is alive.
"""

from __future__ import annotations

import datetime
import logging
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

from colocate_grpo import processes
from colocate_grpo.best_export import export_best
from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.diagnosis import Ending
from colocate_grpo.errors import ConfigError
from colocate_grpo.observe.console import LiveConsole
from colocate_grpo.observe.environment import environment
from colocate_grpo.observe.events import EventLog
from colocate_grpo.observe.metrics import MetricsLog, read_rows
from colocate_grpo.ranks import Ranks
from colocate_grpo.run_directory import RunDirectory

MAX_BACKOFF_S = 600.0
POLL_S = 0.2
GRACE_S = 5.0

log = logging.getLogger(__name__)


def supervise(
    config: Config,
    *,
    command_line: list[str],
    entry: str = "colocate_grpo.loop",
    replay: Path | None = None,
    evaluate_only: bool = False,
) -> int:
    """Run, or resume, until the run is finished, stopped, or beyond help; returns the exit code of the command.

    `entry`: module of a rank; `replay` and `evaluate_only` are handed to it (`--replay DIR`, `--evaluate-only`).
    Exit codes: 0 finished or stopped and resumable, 2 a user's mistake, 130 ended at once by a second signal, else 1.
    Raises ConfigError where the run directory belongs to another run or another driver, `run.until` is no time, or
    there is nothing to replay.
    """
    deadline = Deadline(config)
    if replay and not any(replay.glob("step_*.jsonl.zst")):
        raise ConfigError(f"--replay: {replay} holds no dumped rollouts (step_N.jsonl.zst)")
    run = RunDirectory(config.run_dir.resolve())
    command = [entry, *(["--replay", str(replay.resolve())] if replay else [])]
    command += ["--evaluate-only"] if evaluate_only else []
    with run.locked(), Signals() as signals:
        changed = run.adopt(config)
        run.clear_stop()
        with LiveConsole(run.path) as console:
            supervisor = Supervisor(config, run, signals, deadline, command, console.tick)
            return supervisor.run_to_end(changed, command_line)


class Supervisor:
    """The policy: what to do after each attempt. Holds the run's lock through its caller."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        signals: Signals,
        deadline: Deadline,
        command: list[str],
        show: Callable[[], None],
    ):
        self.config, self.run, self.signals, self.deadline = config, run, signals, deadline
        self.command, self.show = command, show
        self.store = CheckpointStore(run.path, config.checkpoint, config.guards.step.window)
        self.tag = processes.driver_id(run.path)
        self.attempt = run.last_attempt()

    def run_to_end(self, changed: dict[str, tuple[object, object]], command_line: list[str]) -> int:
        """Attempts until one ends the run."""
        processes.become_subreaper()
        self._end_leftovers()
        with processes.lifeline(self.tag, self.run.path / "logs" / "driver.log"):
            if changed:
                self._emit("config_change", changes={key: list(pair) for key, pair in changed.items()})
            if "run.steps" in changed and self.config.train.optimizer.follows_run_steps:
                log.warning(
                    "run.steps changed from %s to %s: the learning rate's schedule follows it, from here on "
                    "(train.optimizer.decay_steps is not set)", *changed["run.steps"],
                )  # fmt: skip
            ending = self._attempts(shlex.join(command_line))
            if self.config.checkpoint.export_best and ending.kind != "interrupted":
                export_best(self.store, self.tag)
        self._emit("run_end", outcome=ending.kind, message=ending.message, step=ending.step)
        log.log(logging.ERROR if ending.failed else logging.INFO, "%s", self._last_words(ending))
        return ending.exit_code

    def _last_words(self, ending: Ending) -> str:
        text = ending.message or ending.kind
        if ending.failed:
            return f"error: {text}"
        newest = self.store.newest() if ending.kind in ("stopped", "interrupted") else None
        return f"{text}; the same command goes on from step {newest.step + 1}" if newest else text

    def _attempts(self, command_line: str) -> Ending:
        failures = 0
        while True:
            before = self._prepare()
            self._tick()
            if reason := self.run.stop_reason():
                return Ending("stopped", f"{reason}, before attempt {self.attempt + 1} began", before)
            ending = self._attempt(command_line)
            if ending.kind == "rollback":
                ending = self._roll_back(ending)
                if ending.kind == "rollback":
                    continue
            if not ending.retried:
                return ending
            failures = 1 if self._has_progressed(before) else failures + 1
            if failures >= self.config.run.max_attempts:
                return Ending(ending.kind, self._giving_up(failures, ending), ending.step)
            self._pause(failures, ending)

    def _prepare(self) -> int:
        """Everything that must be true before ranks start; returns the step they will resume from, -1 for none."""
        self._end_leftovers()
        self.store.tidy()
        self._complete_rollbacks()
        newest, skipped = self.store.newest_verified()
        for entry in skipped:
            if entry.rolled_back:  # somebody decided so, and its event tells of it
                continue
            log.warning("checkpoint skipped: %s", entry)
            self._emit("checkpoint_skipped", path=entry.path.name, reason=entry.reason)
        return newest.step if newest else -1

    def _attempt(self, command_line: str) -> Ending:
        self.attempt += 1
        self.run.record_attempt(self.attempt, started=time.time(), command_line=command_line)
        self._emit("attempt_start", command_line=command_line, **environment())
        ranks = Ranks(self.config, self.run, self.attempt, self.command, self.tag)
        try:
            ending = ranks.watch(self.signals.twice, self._tick)
        finally:
            ranks.end(grace_s=0 if self.signals.twice() else GRACE_S)
        self.run.record_attempt(self.attempt, ended=time.time(), kind=ending.kind, message=ending.message)
        self._emit("attempt_end", outcome=ending.kind, message=ending.message, step=ending.step)
        return ending

    def _tick(self) -> None:
        if self.run.stop_reason() is None and (reason := self.signals.once() or self.deadline.passed()):
            self.run.ask_to_stop(reason)
            self._emit("stop_requested", reason=reason)
            log.info("stopping: %s (once more to leave at once)", reason)
        self.show()

    def _roll_back(self, ending: Ending) -> Ending:
        """Go back to a checkpoint from before the guard's window, a limited number of times."""
        done, limit = len(self.store.rollbacks()), self.config.guards.max_rollbacks
        if done >= limit:
            message = f"{ending.message}; it was rolled back {done} times already (guards.max_rollbacks={limit})"
            return Ending("guard_stop", message, ending.step)
        target = self.store.rollback_target(ending.step)
        self.store.rollback(target, came_from=ending.step, reason=ending.message, by="guard")
        return ending

    def _complete_rollbacks(self) -> None:
        """A rollback is decided by one write of the store; its event and its metrics row follow, also after a kill."""
        recorded = sum(row.get("kind") == "rollback" for row in read_rows(self.run.path))
        for number, entry in enumerate(self.store.rollbacks()[recorded:], start=recorded + 1):
            fields = {"from": entry.came_from, "rollback": number, "reason": entry.reason}
            MetricsLog(self.run.path, self.attempt).append("rollback", entry.to, fields)
            self._emit("rollback", step=entry.to, by=entry.by, **fields)

    def _has_progressed(self, before: int) -> bool:
        newest = self.store.newest()
        return newest is not None and newest.step > before

    def _giving_up(self, failures: int, ending: Ending) -> str:
        return (
            f"{failures} attempts in a row ended without a new checkpoint (run.max_attempts); the last: "
            f"{ending.message}. End of {self.run.log(self.attempt)}:\n{self.run.log_tail(self.attempt)}"
        )

    def _pause(self, failures: int, ending: Ending) -> None:
        seconds = min(self.config.run.backoff * 2 ** (failures - 1), MAX_BACKOFF_S)
        log.warning(
            "attempt %d ended (%s: %s); the next one in %.0f s", self.attempt, ending.kind, ending.message, seconds
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.run.stop_reason() is None:
            self._tick()
            time.sleep(POLL_S)

    def _end_leftovers(self) -> None:
        left = processes.end(processes.run_id(self.run.path), GRACE_S)
        if left:
            log.warning("ended %d processes that an earlier driver of this run had left", len(left))

    def _emit(self, kind: str, **fields: object) -> None:
        EventLog(self.run.path, self.attempt).emit(kind, **fields)


class Signals:
    """SIGINT, SIGTERM and SIGHUP counted instead of obeyed, while the context lasts."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Signals:
        self.previous = {n: signal.signal(n, self._count) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def once(self) -> str | None:
        """Name of the first signal, if there was one."""
        return self.names[0] if self.names else None

    def twice(self) -> bool:
        """Somebody cannot wait."""
        return len(self.names) > 1

    def _count(self, number: int, _frame: object) -> None:
        self.names.append(signal.Signals(number).name)


class Deadline:
    """`run.max_hours` and `run.until` of this start."""

    def __init__(self, config: Config):
        now = time.time()
        limits: dict[str, float] = {}
        if config.run.max_hours is not None:
            limits[f"run.max_hours={config.run.max_hours}"] = now + config.run.max_hours * 3600
        if config.run.until is not None:
            limits[f"run.until={config.run.until}"] = _local_time(config.run.until)
        self.limits = limits

    def passed(self) -> str | None:
        """The option whose time has come, if any."""
        return next((name for name, at in self.limits.items() if time.time() >= at), None)


def _local_time(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(
            f"run.until: {text!r} is no ISO 8601 time, for example 2026-03-31T08:00 (local time)"
        ) from None
