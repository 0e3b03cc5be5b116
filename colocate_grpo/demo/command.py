"""`colocate-grpo demo-model OUT`: make the demo's model and data."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from colocate_grpo.demo.recipe import make_demo
from colocate_grpo.demo.warmup import WarmUp
from colocate_grpo.errors import DataError, writable_directory

MADE = {"model", "model.partial", "train.jsonl", "eval.jsonl"}


def run_demo_model(out_dir: Path, seed: int) -> int:
    """Run the recipe and say what it made; returns the exit code. DataError where it would write over other files."""
    others = sorted({file.name for file in writable_directory(out_dir).iterdir()} - MADE)
    if others:
        raise DataError(f"{out_dir}: holds other files ({others[0]}); name a directory of its own")
    plan, console = WarmUp(), Console()
    with Progress(console=console) as progress:
        task = progress.add_task("warm-up", total=plan.steps)
        paths = make_demo(out_dir, seed, plan, lambda step, _: progress.update(task, completed=step + 1))
    console.print(f"model       {paths.model}", highlight=False)
    console.print(f"training    {paths.train}", highlight=False)
    console.print(f"held out    {paths.evaluation}", highlight=False)
    console.print(f"accuracy    {paths.accuracy:.3f} on the held-out problems at temperature 1", highlight=False)
    return 0
