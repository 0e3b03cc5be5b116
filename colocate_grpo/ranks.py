"""The ranks of one attempt: started by torchrun, watched through state.json, ended with their stacks in the log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from colocate_grpo import processes, stacks
from colocate_grpo.config import Config
from colocate_grpo.diagnosis import Ending, diagnose, host_oom_kills
from colocate_grpo.run_directory import RunDirectory, tail

POLL_S = 0.2
EXIT_TIMEOUT_S = 120.0
GRACE_S = 5.0


class Ranks:
    """One torchrun and everything below it."""

    def __init__(self, config: Config, run: RunDirectory, attempt: int, command: list[str], tag: str):
        self.config, self.run, self.attempt, self.tag = config, run, attempt, tag
        self.others = [child.pid for child in psutil.Process().children()]
        self.oom_kills = host_oom_kills()
        self.started = self.last_progress = time.monotonic()
        self.exit_report_seen: float | None = None
        self.progress = run.state().get("progress")
        with run.log(attempt).open("ab") as log:
            self.torchrun = subprocess.Popen(
                self._command(command), env=self._environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def watch(self, interrupted: Callable[[], bool], on_tick: Callable[[], None]) -> Ending:
        """Wait for the end of the attempt, or bring it about when it hangs or somebody cannot wait."""
        while self._still_runs():
            processes.reap(keep=[self.torchrun.pid])
            on_tick()
            if interrupted():
                return Ending("interrupted", "ended at once, without a save", self._step())
            if complaint := self._hang():
                return self._end_hanging(complaint)
        return self._diagnose()

    def end(self, grace_s: float = GRACE_S) -> None:
        """End what is left of the attempt, wherever it is in the process tree."""
        processes.end(self.tag, grace_s, also=processes.orphans(self.others))
        self.torchrun.wait(timeout=processes.END_TIMEOUT_S)
        processes.reap()
        stacks.remove_files(self.run.log(self.attempt).parent)

    def _still_runs(self) -> bool:
        """Waits a moment for the end; ranks that have said why they end get a limited time to do so."""
        try:
            self.torchrun.wait(timeout=POLL_S)
            return False
        except subprocess.TimeoutExpired:
            pass
        if self.exit_report_seen is None and self.run.exit_report(self.attempt):
            self.exit_report_seen = time.monotonic()
        limit = min(EXIT_TIMEOUT_S, self.config.run.hang_timeout)
        return self.exit_report_seen is None or time.monotonic() - self.exit_report_seen < limit

    def _hang(self) -> str | None:
        state, now = self.run.state(), time.monotonic()
        if state.get("progress") != self.progress:
            self.progress, self.last_progress = state.get("progress"), now
        has_begun = state.get("attempt") == self.attempt
        name = "run.hang_timeout" if has_begun else "run.start_timeout"
        limit = self.config.run.hang_timeout if has_begun else self.config.run.start_timeout
        if now - self.last_progress < limit:
            return None
        where = f"phase {state.get('phase')}, step {state.get('step')}" if has_begun else "the start"
        return f"no progress for {limit:.0f} s ({name}) in {where}"

    def _end_hanging(self, complaint: str) -> Ending:
        log = self.run.log(self.attempt)
        found = stacks.collect(psutil.Process(self.torchrun.pid), log.parent)
        self._note(f"{complaint}; stacks of all ranks:\n{found}")
        self.end(grace_s=0)
        return Ending("hang", f"{complaint}; the stacks are in {log}", self._step())

    def _diagnose(self) -> Ending:
        code = self.torchrun.poll()
        oom_kills = host_oom_kills() - self.oom_kills
        log = tail(self.run.log(self.attempt))
        return diagnose(
            self.run.exit_report(self.attempt), 1 if code is None else code, log, self._own_state(), oom_kills
        )

    def _own_state(self) -> dict[str, object]:
        state = self.run.state()
        return state if state.get("attempt") == self.attempt else {}

    def _step(self) -> int:
        return int(str(self._own_state().get("step", -1)))

    def _note(self, text: str) -> None:
        with self.run.log(self.attempt).open("a") as log:
            log.write(f"\n[driver] {text}\n")

    def _command(self, command: list[str]) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(self.config.parallel.world_size), "--max-restarts", "0",
            "-m", *command, "--run-dir", str(self.run.path), "--attempt", str(self.attempt),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        world = self.config.parallel.world_size
        threads = self.config.run.threads or max(1, len(os.sched_getaffinity(0)) // world)
        return {
            # Threads that spin while they wait take the cores from ranks, reward workers and engines beside them.
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            **processes.tagged(self.tag),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
        }
