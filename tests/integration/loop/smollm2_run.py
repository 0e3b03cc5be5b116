"""One GRPO step of SmolLM2-135M-Instruct on problems of GSM8K, by the real command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from colocate_grpo import processes

GSM8K = Path(__file__).parents[2] / "data" / "math" / "gsm8k_test200.jsonl"
TIMEOUT_S = 1200.0
GROUPS, GROUP_SIZE, HELD_OUT = 2, 4, 2
ANSWER_TOKENS = 16
LONGEST_PROBLEM = 160
# Without an example so small a model boxes one answer in fifty.
EXAMPLE = [
    {"role": "user", "content": "A pen costs $4. How many dollars do 3 pens cost?"},
    {"role": "assistant", "content": "\\boxed{12}"},
]


def problems(count: int, longest: int = 10_000) -> list[dict[str, str]]:
    """The first problems of the file that have at most `longest` characters."""
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    return [row for row in rows if len(row["problem"]) <= longest][:count]


def write_data(directory: Path) -> None:
    """`train.jsonl` and `eval.jsonl`: different problems, a worked example before each."""
    rows = [
        {"prompt": [*EXAMPLE, {"role": "user", "content": row["problem"]}], "label": row["answer"]}
        for row in problems(GROUPS + HELD_OUT, LONGEST_PROBLEM)
    ]
    for name, part in (("train", rows[:GROUPS]), ("eval", rows[GROUPS:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def settings(model: Path, directory: Path) -> dict[str, Any]:
    """The configuration. DAPO's length penalty makes answers of a group differ where none of them is right."""
    overlong = {"function": "soft_overlong", "weight": 0.5, "options": {"cache": ANSWER_TOKENS}}
    return {
        "run": {"dir": str(directory / "run"), "steps": 1, "device": "cpu", "threads": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(directory / "train.jsonl")},
        "rollout": {
            "engine": "embedded", "slots": 16, "prompts_per_step": GROUPS, "group_size": GROUP_SIZE,
            "max_new_tokens": ANSWER_TOKENS, "verify_weights_every": 1,
        },
        "reward": {"function": "weighted", "options": {"parts": [{"function": "math_boxed"}, overlong]}, "workers": 1},
        "train": {"recompute": False, "max_tokens_per_microbatch": 512, "optimizer": {"lr": 1e-5}},
        # Saved while the engine sleeps: the state of the optimizer and the engine's weights are not there at once.
        "checkpoint": {"every": 1},
        "eval": {
            "every": 1, "at_start": False,
            "sets": [{"name": "gsm8k", "path": str(directory / "eval.jsonl"), "temperature": 0}],
        },
    }  # fmt: skip


def train(model: Path, directory: Path) -> Path:
    """`colocate-grpo train` to its end; returns the run directory."""
    write_data(directory)
    config, log, run_dir = directory / "config.yaml", directory / "train.log", directory / "run"
    config.write_text(yaml.safe_dump(settings(model, directory)))
    command = [sys.executable, "-c", "from colocate_grpo.cli import main; main()", "train", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        with log.open("w") as stream:
            code = subprocess.run(command, stdout=stream, stderr=stream, env=environment, timeout=TIMEOUT_S).returncode
    finally:
        left = processes.find(processes.run_id(run_dir))
        for process in left:
            process.send_signal(signal.SIGKILL)
    assert code == 0, log.read_text()[-6000:]
    assert left == [], "the run left processes behind"
    return run_dir
