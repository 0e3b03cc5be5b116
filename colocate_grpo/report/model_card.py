"""The model card beside an exported model, from the same figures as the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from colocate_grpo.checkpoint.files import read_object
from colocate_grpo.observe.metrics import EvalPoint
from colocate_grpo.report.accuracy import Curve, curves, difference, measure
from colocate_grpo.report.headline import interval_text, rate_text
from colocate_grpo.report.markdown import ABSENT, number, text_table
from colocate_grpo.report.record import RunRecord, load_record

MADE_BY = "colocate-grpo"
FILE_NAME = "README.md"


class _Exported(BaseModel):
    model_config = ConfigDict(strict=True)
    step: int


def write_model_card(run: RunRecord, model_dir: Path, step: int | None) -> Path | None:
    """Write README.md into an exported model's directory; `step` None where it is not known.

    Returns None, and writes nothing, where somebody else's README.md is there already.
    """
    path = model_dir / FILE_NAME
    if path.exists() and MADE_BY not in path.read_text(encoding="utf-8", errors="replace"):
        return None
    path.write_text(model_card(run, step), encoding="utf-8")
    return path


def write_export_card(source: Path, model_dir: Path) -> Path | None:
    """The card of what `colocate-grpo export SOURCE MODEL_DIR` wrote; `source` is a run or one of its checkpoints."""
    from colocate_grpo.weights.export import find_checkpoint

    checkpoint, run_dir = find_checkpoint(Path(source))
    return write_model_card(load_record(run_dir), Path(model_dir), int(checkpoint.name.removeprefix("step_")))


def exported_models(run: RunRecord) -> list[tuple[Path, int | None]]:
    """(directory, step) of the Hugging Face directories below `hf/`."""
    directories = sorted(path.parent for path in (run.run_dir / "hf").glob("*/config.json"))
    return [(directory, _step_of(directory)) for directory in directories]


def model_card(run: RunRecord, step: int | None) -> str:
    """Markdown with the hub's metadata at its beginning."""
    front = yaml.safe_dump(_metadata(run, step), sort_keys=False, allow_unicode=True)
    parts = [f"---\n{front}---", f"# {run.name}", _introduction(run, step), *_evaluations(run, step), _training(run)]
    return "\n\n".join(parts) + "\n"


def _introduction(run: RunRecord, step: int | None) -> str:
    at = f"after step {step}" if step is not None else "after training"
    return (
        f"`{_base_model(run)}` {at} of a GRPO run made with {MADE_BY} on the"
        f" prompts of `{Path(str(run.option('data.train', ABSENT))).name}`. All figures come from the run's own record."
    )


def _evaluations(run: RunRecord, step: int | None) -> list[str]:
    rows = [row for curve in curves(run) if (point := _point(curve, step)) and (row := _row(run, curve, point))]
    if not rows:
        return ["These weights were not evaluated."]
    header = ["evaluation", "base", "this model", "difference, points [95 %]", "problems × samples"]
    return [text_table(header, rows), "± is the standard error clustered by problem."]


def _row(run: RunRecord, curve: Curve, point: EvalPoint) -> list[str]:
    base, after = measure(run, curve.baselines), measure(run, [point])
    assert after is not None
    gained = interval_text(difference(base, after)[0]) if base else ABSENT
    size = f"{after.problems} × {after.samples}"
    return [f"{curve.name} (pass@1)", rate_text(base) if base else ABSENT, rate_text(after), gained, size]


def _training(run: RunRecord) -> str:
    batch = (run.option("rollout.prompts_per_step"), run.option("rollout.group_size"))
    rows = [
        ["steps recorded", number(len(run.steps))],
        ["batch", f"{batch[0]} prompts × {batch[1]} answers"],
        ["longest answer", f"{number(run.option('rollout.max_new_tokens'))} tokens"],
        ["reward", f"`{run.option('reward.function', ABSENT)}`"],
        ["advantage", f"`{run.option('algorithm.advantage', ABSENT)}`"],
        ["clip", f"{run.option('algorithm.clip_low', ABSENT)} / {run.option('algorithm.clip_high', ABSENT)}"],
        ["learning rate", str(run.option("train.optimizer.lr", ABSENT))],
        ["seed", str(run.option("run.seed", ABSENT))],
    ]
    return "## Training\n\n" + text_table(["", ""], rows)


def _metadata(run: RunRecord, step: int | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", MADE_BY],
    }
    path = str(run.option("model.path", ""))
    if path.startswith("hf:"):
        metadata["base_model"] = path.removeprefix("hf:")
    results = [_result(curve, point) for curve in curves(run) if (point := _point(curve, step))]
    if results:
        metadata["model-index"] = [{"name": run.name, "results": results}]
    return metadata


def _result(curve: Curve, point: EvalPoint) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": curve.name, "type": curve.name},
        "metrics": [{"type": "pass@1", "value": round(100 * point.accuracy, 2), "name": "pass@1"}],
    }


def _point(curve: Curve, step: int | None) -> EvalPoint | None:
    return curve.at(step) if step is not None else None


def _base_model(run: RunRecord) -> str:
    path = str(run.option("model.path", ABSENT))
    return path if ":" in path else Path(path).name


def _step_of(directory: Path) -> int | None:
    """The step of an exported model: as its `checkpoint.json` says, else as its name `step_39` does."""
    recorded = read_object(directory / "checkpoint.json", _Exported)
    if recorded:
        return int(recorded["step"])
    digits = directory.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else None
