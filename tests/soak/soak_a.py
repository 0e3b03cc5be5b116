"""Soak A: the demo under random faults must end exactly like the demo without.

    python -m tests.soak.soak_a --work /tmp/soak_a --steps 200 --faults 25 --log reports/soak_a.log

Faults: `kill -9` of a rank and of the driver (then the same command again), SIGTERM (the same), a rank that hangs
(SIGSTOP), a full disk before and during a save (a small tmpfs mount), a bit flipped in the newest checkpoint.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config import CheckpointConfig
from tests.soak.soak_run import (
    REPOSITORY,
    Run,
    assert_nothing_left,
    assert_same_metrics,
    assert_same_rollouts,
    fill,
    flip_a_bit,
)

KINDS = ("kill_rank", "sigterm", "hang", "full_disk", "corrupt_newest", "kill_driver")
DISK = "96m"
HANG_TIMEOUT_S = 60
RUN_TIMEOUT_S = 3 * 3600
SAVE_EVERY = 5


@dataclass
class Soak:
    """One soak: its size, its run, its chance, and where its log goes."""

    work: Path
    model: Path
    steps: int
    faults: int
    overrides: list[str]
    log: IO[str]
    seed: int = 0

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.chance = random.Random(self.seed)
        self.run = self._new_run("faulted")
        self.done: Counter[str] = Counter()

    def say(self, text: str) -> None:
        """A line with the seconds since the start, on the console and in the log."""
        for stream in (sys.stdout, self.log):
            print(f"[{time.monotonic() - self.started:7.1f}] {text}", file=stream, flush=True)

    def execute(self) -> None:
        """Both runs, and everything that must hold."""
        self.say(f"soak A: {self.steps} steps, {self.faults} faults, seed {self.seed}")
        reference = self._new_run("reference")
        try:
            reference.start()
            assert reference.wait_end(RUN_TIMEOUT_S) == 0, reference.output()[-3000:]
            assert_nothing_left(reference)
            self.say("the uninterrupted run has finished")
            with_small_disk(self.run.path / "checkpoints", self._faulted_run)
            self._judge(reference)
        finally:
            reference.end()
            self.run.end()

    def _faulted_run(self) -> None:
        plan = self._plan()
        self.run.start()
        for step, kind in plan:
            self.run.wait_for(f"step {step}", lambda step=step: self._is_at(step))
            time.sleep(self.chance.uniform(0, 1.0))
            state = self.run.state()
            number = sum(self.done.values()) + 1
            self.say(f"fault {number}/{self.faults}: {kind} at step {state.get('step')}, phase {state.get('phase')}")
            getattr(self, kind)()
            self.done[kind] += 1
        assert self.run.wait_end(RUN_TIMEOUT_S) == 0, self.run.output()[-3000:]
        assert_nothing_left(self.run)

    def _plan(self) -> list[tuple[int, str]]:
        """Every kind as often as the others, in random order, at random steps that leave room for a checkpoint."""
        kinds = [KINDS[i % len(KINDS)] for i in range(self.faults)]
        self.chance.shuffle(kinds)
        steps = self.chance.sample(range(2, self.steps - SAVE_EVERY), self.faults)
        return list(zip(sorted(steps), kinds, strict=True))

    def _is_at(self, step: int) -> bool:
        """The present attempt says so: what an ended one or a killed driver has left is no sign of life."""
        state = self.run.state()
        if state.get("time", 0.0) < self.run.started or self._attempt_has_ended(state["attempt"]):
            return False
        return state["step"] >= step and state["phase"] != "start"

    # The faults

    def kill_rank(self) -> None:
        """`kill -9` of a random rank; the driver goes on by itself."""
        self._signal_a_rank(signal.SIGKILL)

    def hang(self) -> None:
        """A rank stops without ending; the watchdog finds out."""
        self._signal_a_rank(signal.SIGSTOP)

    def kill_driver(self) -> None:
        """`kill -9` of the driver: everything else ends too, and the same command goes on."""
        self.run.process().send_signal(signal.SIGKILL)
        self.run.wait_end(60)
        assert_nothing_left(self.run)
        self.run.start()

    def sigterm(self) -> None:
        """A clean stop, then the same command."""
        self.run.process().send_signal(signal.SIGTERM)
        code = self.run.wait_end(600)
        assert code == 0, f"a clean stop ended with code {code}:\n{self.run.output()[-3000:]}"
        assert_nothing_left(self.run)
        self.run.start()

    def full_disk(self) -> None:
        """No room before or during the next save; the run goes on, and the room comes back."""
        store = self._store()
        newest = self.run.wait_for("a checkpoint", store.newest)
        failures = len(self.run.events("save_failed"))
        # Just its own size is left: the save begins, and fails in the middle. Less: it does not begin.
        ballast = fill(store.root, keep_free=self.chance.choice([newest.size + 4096, newest.size // 2]))
        try:
            self.run.wait_for(
                "a failed save", lambda: self._has_ended_or(len(self.run.events("save_failed")) > failures)
            )
        finally:
            ballast.unlink()
        self.say(f"  {self.run.events('save_failed')[-1]['error']}")

    def corrupt_newest(self) -> None:
        """A bit flips in the newest checkpoint, and then it is needed."""
        store = self._store()
        self.run.wait_for("two checkpoints", lambda: len(store.complete()) >= 2)
        newest = store.newest()
        assert newest is not None
        victim = self.chance.choice(sorted(newest.manifest["files"]))
        flip_a_bit(newest.path / victim, self.chance)
        skips = len(self.run.events("checkpoint_skipped"))
        self.kill_driver()
        self.run.wait_for("the damage to be found", lambda: len(self.run.events("checkpoint_skipped")) > skips)
        self.say(
            f"  flipped a bit of {newest.path.name}/{victim}; {self.run.events('checkpoint_skipped')[-1]['reason']}"
        )

    def _signal_a_rank(self, number: signal.Signals) -> None:
        ranks = self.run.wait_for("ranks", self.run.ranks)
        attempt = self.run.state()["attempt"]
        self.chance.choice(ranks).send_signal(number)
        self.run.wait_for("the end of the attempt", lambda: self._attempt_has_ended(attempt))

    def _attempt_has_ended(self, attempt: int) -> bool:
        return any(event["attempt"] == attempt for event in self.run.events("attempt_end"))

    def _has_ended_or(self, condition: bool) -> bool:
        return condition or self.run.has_ended()

    # The judgement

    def _judge(self, reference: Run) -> None:
        assert_same_metrics(self.run, reference, self.steps)
        self.say(f"metrics: the last rows of all {self.steps} steps equal the uninterrupted run's, bit for bit")
        assert_same_rollouts(self.run, reference, self.steps)
        self.say("rollouts: every prompt and every sampled token of every step equal the uninterrupted run's")
        outcomes = Counter(event["outcome"] for event in self.run.events("attempt_end"))
        self.say(f"attempts: {len(self.run.events('attempt_start'))} ({dict(outcomes)}), faults: {dict(self.done)}")
        assert sum(self.done.values()) == self.faults
        assert outcomes["finished"] == 1
        for point in self.run.view().evaluations:
            self.say(f"evaluation {point.name} after {point.updates} updates: {point.accuracy:.3f}")
        self.say("no process of either run is left")

    def final_accuracy(self) -> float:
        """Of the last evaluation."""
        return max(self.run.view().evaluations, key=lambda point: point.updates).accuracy

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.run.path, CheckpointConfig())

    def _new_run(self, name: str) -> Run:
        data = self.model.parent
        overrides = [
            f"run.steps={self.steps}", f"run.hang_timeout={HANG_TIMEOUT_S}", "run.backoff=0.5", "run.max_attempts=20",
            f"model.path={self.model}", f"data.train={data / 'train.jsonl'}", f"eval.sets.0.path={data / 'eval.jsonl'}",
            f"checkpoint.every={SAVE_EVERY}", "checkpoint.keep_last=2", "checkpoint.min_free_gib=0", *self.overrides,
        ]  # fmt: skip
        return Run(self.work / name, REPOSITORY / "configs" / "demo.yaml", overrides, self.say)


def with_small_disk(directory: Path, work: Callable[[], None]) -> None:
    """Mount a small tmpfs on `directory` while `work` is done; needs the right to mount (see `main`)."""
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak", str(directory)], check=True)
    try:
        work()
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory for the two runs")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "runs" / "demo_model" / "model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float, default=0.9)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the runs are ended as well
    a.log.parent.mkdir(parents=True, exist_ok=True)
    with a.log.open("w") as log:
        soak = Soak(a.work.resolve(), a.model.resolve(), a.steps, a.faults, a.overrides, log, a.seed)
        soak.execute()
        accuracy = soak.final_accuracy()
        passed = accuracy >= a.min_accuracy
        soak.say(f"final accuracy {accuracy:.3f} (at least {a.min_accuracy}): {'PASSED' if passed else 'FAILED'}")
        soak.say(f"machine: {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
