"""After a real run the best checkpoint is there as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from colocate_grpo import processes
from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.config_file import load_config
from colocate_grpo.demo.recipe import DemoPaths
from colocate_grpo.lead import NOTHING, Lead

REPOSITORY = Path(__file__).parents[3]
SMALL = [
    "run.steps=3", "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.slots=8", "checkpoint.every=1",
    "checkpoint.keep_best=1", "checkpoint.best_metric=eval/held_out", "checkpoint.export_best=true",
    "checkpoint.min_free_gib=0", "eval.every=1", "eval.at_start=false", "eval.sets.0.limit=4",
    "train.optimizer.warmup_steps=1",
]  # fmt: skip


@pytest.mark.timeout(900)
def test_the_best_checkpoint_is_exported_at_the_end(tmp_path: Path, demo: DemoPaths) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", "from colocate_grpo.cli import main; main()", "train", "configs/demo.yaml",
         f"run.dir={run_dir}", f"model.path={demo.model}", f"data.train={demo.train}",
         f"eval.sets.0.path={demo.evaluation}", *SMALL],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    best = json.loads((run_dir / "hf/best/checkpoint.json").read_text())["step"]
    scores = {
        p.parent.name: json.loads(p.read_text())["eval/held_out"] for p in run_dir.glob("checkpoints/*/evaluation.json")
    }
    assert scores[f"step_{best:06d}"] == max(scores.values())
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "hf/best", dtype=torch.float32)
    untouched = AutoModelForCausalLM.from_pretrained(demo.model, dtype=torch.float32)
    pairs = zip(trained.parameters(), untouched.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert processes.find(processes.run_id(run_dir)) == []
    the_first_save_needs_the_planned_room(run_dir, tmp_path / "another_run", Path(demo.model))


def the_first_save_needs_the_planned_room(trained: Path, run_dir: Path, model: Path) -> None:
    config = load_config(trained / "config.yaml", [f"run.dir={run_dir}"])
    saved = CheckpointStore.of(load_config(trained / "config.yaml")).newest()
    assert saved is not None
    run_dir.mkdir()
    lead = Lead(config, run_dir, 1, model)
    assert 0.9 * saved.size < lead.planned_bytes < 1.1 * saved.size
    assert Path(lead.begin_save(0)).is_dir()
    lead.planned_bytes = 1 << 60
    assert lead.begin_save(0) == NOTHING
    lead.close()
