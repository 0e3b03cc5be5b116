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
from colocate_grpo.checkpoint.rollbacks import tell_rollbacks
from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import Config
from colocate_grpo.diagnosis import Ending
from colocate_grpo.disk_full import best_effort, is_full, told_in_one_line
from colocate_grpo.errors import ConfigError
from colocate_grpo.observe.console import LiveConsole
from colocate_grpo.observe.environment import environment
from colocate_grpo.observe.events import EventLog
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
    Raises ConfigError where the run directory belongs to another run or another driver, or there is nothing to
    replay; DiskFull where there is no room even to begin.
    """
    deadline = Deadline(config)
    if replay and not any(replay.glob("step_*.jsonl.zst")):
        raise ConfigError(f"--replay: {replay} holds no dumped rollouts (step_N.jsonl.zst)")
    run = RunDirectory(config.run_dir.resolve())
    command = [entry, *(["--replay", str(replay.resolve())] if replay else [])]
    command += ["--evaluate-only"] if evaluate_only else []
    with told_in_one_line(run.path), run.locked(), Signals() as signals:
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
            self._tell_of_options(changed)
            ending = self._attempts(shlex.join(command_line))
            if self.config.checkpoint.export_best and ending.kind == "finished":
                export_best(self.store, self.tag, self._is_asked_to_end)
        self._emit("run_end", outcome=ending.kind, message=ending.message, step=ending.step)
        log.log(logging.ERROR if ending.failed else logging.INFO, "%s", self._last_words(ending))
        return ending.exit_code

    def _tell_of_options(self, changed: dict[str, tuple[object, object]]) -> None:
        if changed:
            self._emit("config_change", changes={key: list(pair) for key, pair in changed.items()})
        if "run.steps" in changed and self.config.train.optimizer.follows_run_steps:
            log.warning(
                "run.steps changed from %s to %s: the learning rate's schedule follows it, from here on "
                "(train.optimizer.decay_steps is not set)", *changed["run.steps"],
            )  # fmt: skip
        if self.config.checkpoint.keep_best and not self.config.eval.every:
            log.warning("checkpoint.keep_best keeps nothing: with eval.every=0 no checkpoint is evaluated")

    def _last_words(self, ending: Ending) -> str:
        text = ending.message or ending.kind
        if ending.failed:
            return f"error: {text}"
        newest = self.store.newest() if ending.kind in ("stopped", "interrupted") else None
        return f"{text}; the same command goes on from step {newest.step + 1}" if newest else text

    def _attempts(self, command_line: str) -> Ending:
        failures = 0
        while True:
            before = self._newest_step()
            try:
                before = self._prepare()
                self._tick()
                if reason := self.run.stop_reason():
                    return Ending("stopped", f"{reason}, before attempt {self.attempt + 1} began", before)
                ending = self._attempt(command_line)
                if ending.kind == "rollback":
                    ending = self._roll_back(ending)
            except OSError as error:  # what decides how the run goes on could not be written: later there may be room
                ending = _want_of_room(error, before)
            if ending.kind == "rollback":
                continue
            if not ending.retried:
                return ending
            failures = 0 if self._newest_step() > before else failures + 1
            if failures >= self.config.run.max_attempts:
                return Ending(ending.kind, self._giving_up(failures, ending), ending.step)
            self._pause(failures, ending)

    def _prepare(self) -> int:
        """Everything that must be true before ranks start; returns the step they will resume from, -1 for none."""
        self._end_leftovers()
        self.store.tidy()
        tell_rollbacks(self.run.path, self.attempt)
        _, skipped = self.store.newest_verified()
        for entry in skipped:
            if entry.rolled_back:  # somebody decided so, and its event tells of it
                continue
            log.warning("checkpoint skipped: %s", entry)
            self._emit("checkpoint_skipped", path=entry.path.name, reason=entry.reason)
        return self._newest_step()

    def _attempt(self, command_line: str) -> Ending:
        self.attempt += 1
        self._record(started=time.time(), command_line=command_line)
        self._emit("attempt_start", command_line=command_line, **environment())
        try:
            ending = self._watch_ranks()
        except OSError as error:  # of the driver's own: what the ranks could not write is in their exit
            ending = _want_of_room(error, -1)
        self._record(ended=time.time(), kind=ending.kind, message=ending.message)
        self._emit("attempt_end", outcome=ending.kind, message=ending.message, step=ending.step)
        return ending

    def _watch_ranks(self) -> Ending:
        ranks = Ranks(self.config, self.run, self.attempt, self.command, self.tag)
        try:
            return ranks.watch(self.signals.twice, self._tick)
        finally:
            ranks.end(grace_s=0 if self.signals.twice() else GRACE_S)

    def _tick(self) -> None:
        if self.run.stop_reason() is None and (reason := self.signals.once() or self.deadline.passed()):
            with best_effort("control/stop"):  # an empty file is there all the same, and asks as well
                self.run.ask_to_stop(reason)
            self._emit("stop_requested", reason=reason)
            log.info("stopping: %s (once more to leave at once)", reason)
        self.show()

    def _roll_back(self, ending: Ending) -> Ending:
        """Go back to a checkpoint from before the guard's window, a limited number of times."""
        done = sum(entry.by == "guard" for entry in self.store.rollbacks())
        limit = self.config.guards.max_rollbacks
        if done >= limit:
            message = f"{ending.message}; it was rolled back {done} times already (guards.max_rollbacks={limit})"
            return Ending("guard_stop", message, ending.step)
        target = self.store.rollback_target(ending.step)
        self.store.rollback(target, came_from=ending.step, reason=ending.message, by="guard")
        return ending

    def _newest_step(self) -> int:
        newest = self.store.newest()
        return newest.step if newest else -1

    def _giving_up(self, failures: int, ending: Ending) -> str:
        return (
            f"{failures} attempt{'s in a row' if failures > 1 else ''} ended without a new checkpoint "
            f"(run.max_attempts={self.config.run.max_attempts}); the last: "
            f"{ending.message}. End of {self.run.log(self.attempt)}:\n{self.run.log_tail(self.attempt)}"
        )

    def _pause(self, failures: int, ending: Ending) -> None:
        seconds = min(self.config.run.backoff * 2 ** max(0, failures - 1), MAX_BACKOFF_S)
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

    def _is_asked_to_end(self) -> bool:
        return self.signals.once() is not None or self.run.stop_reason() is not None

    def _record(self, **values: object) -> None:
        with best_effort(f"attempts/{self.attempt}.json"):
            self.run.record_attempt(self.attempt, **values)

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
    """`run.max_hours` of this start, whatever happens to the machine's clock, and `run.until` by that clock."""

    def __init__(self, config: Config):
        self.max_hours, self.until = config.run.max_hours, config.run.until
        self.started = time.monotonic()
        self.until_time = datetime.datetime.fromisoformat(self.until).timestamp() if self.until else None

    def passed(self) -> str | None:
        """The option whose time has come, if any."""
        if self.max_hours is not None and time.monotonic() - self.started >= self.max_hours * 3600:
            return f"run.max_hours={self.max_hours}"
        if self.until_time is not None and time.time() >= self.until_time:
            return f"run.until={self.until}"
        return None


def _want_of_room(error: OSError, step: int) -> Ending:
    """The ending of an attempt that the driver could not keep the books of; any other error is raised again."""
    if not is_full(error):
        raise error
    return Ending("crash", f"the disk is full: {error}", step)
