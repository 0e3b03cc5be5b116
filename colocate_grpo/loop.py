"""The loop: GRPO with rollout and training on the same cards. `python -m colocate_grpo.loop` is one rank of it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from colocate_grpo import stacks
from colocate_grpo.attempt import Attempt, GuardStop, RollBack
from colocate_grpo.config import Config
from colocate_grpo.config_file import load_config
from colocate_grpo.errors import UserError
from colocate_grpo.hub import resolve_model
from colocate_grpo.lead import Lead, StopRequested
from colocate_grpo.observe.state import read_state
from colocate_grpo.rollout.engine import EngineError, RolloutEngine
from colocate_grpo.train.parallel import Parallel


def run(a: Attempt) -> None:
    """All of GRPO. Every rank runs this; rank 0 generates, all of them train."""
    first_step = a.start(make_engine)
    a.evaluate_untouched()
    a.evaluate_if_due(first_step - 1)
    for step in range(first_step, a.config.run.steps):
        with a.one_step(step):
            batch = a.rollout(step)
            a.sleep_engines()
            a.wake_trainer()
            a.update(step, batch)
            a.save_if_due(step)
            a.sleep_trainer()
            a.push()
        a.evaluate_if_due(step)
    a.finish()


def replay(a: Attempt, rollouts: Path) -> None:
    """Train from dumped rollouts, with no engine; ends with the last dump."""
    for step in range(a.start_without_engine(), a.config.run.steps):
        if not a.is_dumped(step, rollouts):
            break
        with a.one_step(step):
            batch = a.dumped_batch(step, rollouts)
            a.update(step, batch)
            a.save_if_due(step)
    a.finish()


def evaluate(a: Attempt) -> None:
    """Evaluate the newest checkpoint, or the untouched model where there is none."""
    first_step = a.start(make_engine)
    a.evaluate(first_step - 1)


def make_engine(config: Config, run_dir: Path, model_dir: Path, on_event: Callable[..., object]) -> RolloutEngine:
    """The rollout engine of the configuration, not started yet."""
    if config.rollout.engine == "embedded":
        from colocate_grpo.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine(config, model_dir)
    from colocate_grpo.rollout.sglang_pool import SglangPool

    return SglangPool(config, run_dir, model_dir, on_event)


def main() -> int:
    """One rank of one attempt; the exit code is 0 when the run finished or was stopped, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description="one rank of one attempt; started by the driver")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--replay", type=Path, help="directory of dumped rollouts")
    parser.add_argument("--evaluate-only", action="store_true")
    arguments = parser.parse_args()
    _prepare_process(arguments.run_dir)
    try:
        _attempt(arguments)
    except BaseException as error:  # the cause of every end is written down before the process is gone
        kind = cause(error)
        _write_exit(
            arguments.run_dir, arguments.attempt, kind, str(error) or (repr(error) if kind != "stopped" else "")
        )
        if kind in ("stopped", "guard_stop", "rollback"):
            return 0
        traceback.print_exc()
        return UserError.exit_code if kind == "user_error" else 1
    _write_exit(arguments.run_dir, arguments.attempt, "finished", "")
    return 0


def cause(error: BaseException) -> str:
    """Kind of an attempt's end, on which the driver decides what comes next."""
    kinds: list[tuple[type[BaseException] | tuple[type[BaseException], ...], str]] = [
        (StopRequested, "stopped"),
        (GuardStop, "guard_stop"),
        (RollBack, "rollback"),
        (UserError, "user_error"),
        ((torch.OutOfMemoryError, MemoryError), "oom"),
        (EngineError, "engine"),
    ]
    return next((kind for types, kind in kinds if isinstance(error, types)), "crash")


def _attempt(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run_dir / "config.yaml")
    model_dir = resolve_model(config.model)
    lead = Lead(config, arguments.run_dir, arguments.attempt, model_dir) if _rank() == 0 else None
    if lead and not (arguments.replay or arguments.evaluate_only):
        lead.require_place_in_data()
    parallel = Parallel.initialise(config)
    attempt = Attempt(config, arguments.run_dir, model_dir, parallel, lead)
    try:
        if arguments.replay:
            replay(attempt, arguments.replay)
        elif arguments.evaluate_only:
            evaluate(attempt)
        else:
            run(attempt)
    except StopRequested:
        attempt.save_from_rollout()
        raise
    finally:
        if lead:
            lead.close()
    parallel.shutdown()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _prepare_process(run_dir: Path) -> None:
    """Ctrl-C reaches every process of a terminal; only the driver decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks.write_when_asked(run_dir / "logs")
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {_rank()} %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def _write_exit(run_dir: Path, attempt: int, kind: str, message: str) -> None:
    """The first rank to end tells why; what the others see is its consequence."""
    path = run_dir / "attempts" / f"{attempt}.exit.json"
    path.parent.mkdir(exist_ok=True)
    first_line = message.splitlines()[0] if message else ""
    report = {"kind": kind, "message": first_line, "step": read_state(run_dir).get("step", -1), "time": time.time()}
    try:
        with path.open("x") as file:
            json.dump(report, file)
    except FileExistsError:  # another rank was first
        return


if __name__ == "__main__":
    sys.exit(main())
