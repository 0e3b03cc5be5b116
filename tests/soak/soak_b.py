"""Soak B: a run on two real SGLang servers, one of which is killed or stopped in the rollout, the push and asleep.

    python -m tests.soak.soak_b --work /tmp/soak_b --log reports/soak_b.log

The run must finish without a new attempt, every lost engine must come back with the trainer's weights (their checksums
are compared after every push), and no process may be left.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from pathlib import Path
from typing import IO

import psutil

from tests.soak.soak_run import REPOSITORY, Run, assert_nothing_left

PHASES = {"rollout": "rollout", "push": "push", "sleep": "train"}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
FAULTS = [(what, where) for where in PHASES for what in SIGNALS]
STEPS = 10
RUN_TIMEOUT_S = 2 * 3600
OVERRIDES = [
    f"run.steps={STEPS}", "rollout.engine=sglang", "rollout.engines=2", "rollout.verify_weights_every=1",
    "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.token_timeout=120s", "rollout.start_timeout=20m",
    "run.start_timeout=40m", "run.hang_timeout=30m", "run.max_attempts=1", "checkpoint.every=5", "eval.every=0",
    "eval.at_start=false", "train.optimizer.warmup_steps=2",
]  # fmt: skip


class Soak:
    """One run, and one fault after the other on its servers."""

    def __init__(self, work: Path, model: Path, log: IO[str], seed: int, overrides: list[str]):
        self.log, self.started, self.chance = log, time.monotonic(), random.Random(seed)
        data = [f"model.path={model}", f"data.train={model.parent / 'train.jsonl'}",
                f"eval.sets.0.path={model.parent / 'eval.jsonl'}"]  # fmt: skip
        self.run = Run(work / "run", REPOSITORY / "configs" / "demo.yaml", [*data, *OVERRIDES, *overrides], self.say)

    def say(self, text: str) -> None:
        """A line with the seconds since the start, on the console and in the log."""
        for stream in (sys.stdout, self.log):
            print(f"[{time.monotonic() - self.started:7.1f}] {text}", file=stream, flush=True)

    def execute(self) -> None:
        """The run, the faults, the judgement."""
        self.say(f"soak B: {STEPS} steps on 2 SGLang servers, {len(FAULTS)} faults")
        self.run.start()
        try:
            for number, (what, where) in enumerate(FAULTS, start=1):
                self._hit(number, what, where)
            assert self.run.wait_end(RUN_TIMEOUT_S) == 0, self.run.output()[-3000:]
            assert_nothing_left(self.run)
            self._judge()
        finally:
            self.run.end()

    def _hit(self, number: int, what: str, where: str) -> None:
        """One fault, and the engine's way back."""
        self.run.wait_for("two servers", lambda: len(self._servers()) == 2, 3600)
        lost, back = (len(self.run.events(kind)) for kind in ("engine_lost", "engine_restarted"))
        victim = self.chance.choice(self._servers())  # beforehand: a push takes less time than finding a process
        self.run.wait_for(where, lambda: self._is_in(where, number), 3600)
        victim.send_signal(SIGNALS[what])
        state = self.run.state()
        assert state["phase"] == PHASES[where], f"the fault came too late: {state}"
        self.say(f"fault {number}/{len(FAULTS)}: {what} server {victim.pid} during {where}, step {state['step']}")
        self.run.wait_for("the loss", lambda: len(self.run.events("engine_lost")) > lost, 1800)
        self.say(f"  lost: {self.run.events('engine_lost')[-1]['message']}")
        self.run.wait_for("the restart", lambda: len(self.run.events("engine_restarted")) > back, 3600)
        self.say("  restarted")

    def _is_in(self, where: str, number: int) -> bool:
        """The phase, after the first push (before it there is nothing to lose), one step after the last fault."""
        state = self.run.state()
        return state.get("step", -1) >= number and state.get("phase") == PHASES[where]

    def _servers(self) -> list[psutil.Process]:
        found = []
        for process in self.run.tagged():
            try:
                if "sglang.launch_server" in process.cmdline() and process.parent() in self.run.ranks():
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _judge(self) -> None:
        counted = self.run.view()
        assert sorted(counted.steps) == list(range(STEPS)), f"steps {sorted(counted.steps)}"
        outcomes = [event["outcome"] for event in self.run.events("attempt_end")]
        assert outcomes == ["finished"], outcomes
        failed = {step: row.get("rollout/failed_ratio") for step, row in counted.steps.items()}
        mismatch = max(row["train/train_rollout_logprob_abs_diff"] for row in counted.steps.values())
        versions = [row["weight_version"] for row in counted.steps.values()]
        assert versions == sorted(set(versions)), f"weight versions {versions}"
        kinds = {kind: len(self.run.events(kind)) for kind in ("engine_lost", "engine_restarted")}
        self.say(f"all {STEPS} steps in one attempt; {kinds}; failed share a step: {failed}")
        self.say(f"largest train/rollout log-prob difference: {mismatch:.2e}; weight versions {versions}")
        self.say("no process of the run is left: PASSED")
        self.say(f"machine: {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory for the run")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "runs" / "demo_model" / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the runs are ended as well
    a.log.parent.mkdir(parents=True, exist_ok=True)
    with a.log.open("w") as log:
        Soak(a.work.resolve(), a.model.resolve(), log, a.seed, a.overrides).execute()
    return 0


if __name__ == "__main__":
    sys.exit(main())
