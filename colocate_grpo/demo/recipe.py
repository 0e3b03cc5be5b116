"""The demo's recipe: tokenizer, model, warm-up, training and held-out problems, all from one seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from colocate_grpo.demo.accuracy import measure_accuracy
from colocate_grpo.demo.task import Problem, split
from colocate_grpo.demo.tokenizer import build_tokenizer
from colocate_grpo.demo.warmup import WarmUp, build_model, warm_up


@dataclass(frozen=True)
class DemoPaths:
    """What the recipe made, and the accuracy of the warmed-up model on the held-out problems at temperature 1."""

    model: Path
    train: Path
    evaluation: Path
    accuracy: float


def make_demo(
    out_dir: Path, seed: int = 0, plan: WarmUp | None = None, on_step: Callable[[int, float], None] = lambda *_: None
) -> DemoPaths:
    """Write `model/`, `train.jsonl` and `eval.jsonl`; the same seed gives the same bytes on the same machine.

    The model directory appears last and whole.
    """
    training, held_out = split()
    model_dir, partial = out_dir / "model", out_dir / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    train, evaluation = out_dir / "train.jsonl", out_dir / "eval.jsonl"
    _write_problems(train, training)
    _write_problems(evaluation, held_out)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    warm_up(model, tokenizer, training, seed, plan or WarmUp(), on_step)
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    accuracy = measure_accuracy(partial, evaluation, seed)
    shutil.rmtree(model_dir, ignore_errors=True)
    partial.rename(model_dir)
    return DemoPaths(model_dir, train, evaluation, accuracy)


def _write_problems(path: Path, problems: Sequence[Problem]) -> None:
    path.write_text("".join(json.dumps({"prompt": p.prompt, "label": p.label}) + "\n" for p in problems))
