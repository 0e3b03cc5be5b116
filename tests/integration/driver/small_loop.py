"""A rank that keeps the loop's contract with the driver (state, stop file, checkpoints, exit report), and nothing else.

Its faults come from `faults.json` in the run directory: attempt -> {kind, step}.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from colocate_grpo import stacks
from colocate_grpo.checkpoint.store import CheckpointStore, rollbacks
from colocate_grpo.config_file import load_config
from colocate_grpo.observe.metrics import MetricsLog
from colocate_grpo.observe.state import StateFile

STEP_S = 0.05
ENGINE = "import time; time.sleep(600)"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--attempt", type=int)
    arguments = parser.parse_args()
    stacks.write_when_asked(arguments.run_dir / "logs")
    path = arguments.run_dir / "faults.json"
    fault = json.loads(path.read_text()).get(str(arguments.attempt), {}) if path.exists() else {}
    if os.environ["RANK"] == "0":
        return Rank0(arguments.run_dir, arguments.attempt, fault).run()
    return wait_for_rank_0(arguments.run_dir, arguments.attempt)


def wait_for_rank_0(run_dir: Path, attempt: int) -> int:
    while not (run_dir / "attempts" / f"{attempt}.exit.json").exists():
        time.sleep(0.02)
    return 0


class Rank0:
    def __init__(self, run_dir: Path, attempt: int, fault: dict[str, Any]):
        self.run_dir, self.attempt, self.fault = run_dir, attempt, fault
        self.config = load_config(run_dir / "config.yaml")
        self.store = CheckpointStore(run_dir, self.config.checkpoint, self.config.guards.step.window)
        # An engine: in a session of its own, and orphaned when this rank dies.
        self.engine = subprocess.Popen([sys.executable, "-c", ENGINE], start_new_session=True)
        (run_dir / "engine_pids").open("a").write(f"{self.engine.pid}\n")

    def run(self) -> int:
        if self.fault.get("kind") == "start_hang":
            time.sleep(600)
        newest = self.store.newest()
        metrics, state = MetricsLog(self.run_dir, self.attempt), StateFile(self.run_dir, self.attempt, 0)
        first = newest.step + 1 if newest else 0
        for step in range(first, self.config.run.steps):
            state.update(step=step, phase="train")
            if (self.run_dir / "control" / "stop").exists():
                self.save(step - 1)
                return self.end("stopped", "asked to", step)
            if step == self.fault.get("step"):
                code = self.fail(step)
                if code is not None:
                    return code
            time.sleep(STEP_S)
            metrics.append("step", step, {"salt": len(rollbacks(self.run_dir)), "memory/train/free_gib": 1.5})
            if (step + 1) % self.config.checkpoint.every == 0:
                self.save(step)
        return self.end("finished", "all steps done", self.config.run.steps)

    def fail(self, step: int) -> int | None:
        kind = self.fault["kind"]
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise RuntimeError("the engine does not answer")
        if kind == "cuda_oom":
            raise RuntimeError("CUDA out of memory. Tried to allocate 3.25 GiB. GPU 0 has a total capacity of 24 GiB")
        if kind == "hang":
            time.sleep(600)
        if kind == "pause":  # until somebody touches control/go_on
            while not (self.run_dir / "control" / "go_on").exists():
                time.sleep(0.02)
            return None
        return self.end(kind, self.fault.get("message", "because"), step)

    def save(self, step: int) -> None:
        if step < 0:
            return
        path = self.store.begin(step)
        (path / "loop.json").write_text(json.dumps({"step": step}))
        self.store.publish(path, {})

    def end(self, kind: str, message: str, step: int) -> int:
        report = {"kind": kind, "message": message, "step": step}
        (self.run_dir / "attempts" / f"{self.attempt}.exit.json").write_text(json.dumps(report))
        if self.fault.get("linger"):
            time.sleep(600)
        if kind in ("finished", "stopped"):
            self.engine.kill()
            self.engine.wait()
            return 0
        return 2 if kind == "user_error" else 1


if __name__ == "__main__":
    sys.exit(main())
