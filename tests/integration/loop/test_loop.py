"""The whole loop on real parts: what a run leaves, what a kill costs, and that layouts agree."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from loop_runs import DEMO, TIMEOUT_S, kill_tree, measured
from transformers import AutoModelForCausalLM, AutoTokenizer

from colocate_grpo.checkpoint.store import CheckpointStore
from colocate_grpo.cli import main
from colocate_grpo.config_file import load_config
from colocate_grpo.observe.events import read_events
from colocate_grpo.observe.metrics import read_rows, view
from colocate_grpo.trajectory import read_trajectories

pytestmark = pytest.mark.timeout(1500)  # a limit for hangs: several runs, and the model they begin with
STEPS = 6


def evaluations(run_dir):
    return [(p.step, p.baseline, p.accuracy) for p in view(read_rows(run_dir)).evaluations]


def test_a_run_leaves_its_record(reference):
    rows = measured(reference)
    assert sorted(rows) == list(range(STEPS))
    assert [rows[s]["weight_version"] for s in range(STEPS)] == list(range(STEPS))
    assert all(rows[s]["train/train_rollout_logprob_abs_diff"] < 1e-4 for s in range(STEPS))
    assert all(rows[s]["train/grad_norm"] > 0 for s in range(STEPS))
    assert [(step, baseline) for step, baseline, _ in evaluations(reference)] == [(0, 0), (3, None)]
    parts = [row["protocol_parts/held_out"] for row in read_rows(reference) if row["kind"] == "eval"]
    assert {(p["samples"], p["temperature"], p["max_new_tokens"], p["problems"]) for p in parts} == {(1, 1.0, 48, 32)}
    assert all(p["first_prompt"] and Path(p["path"]).name == "eval.jsonl" for p in parts)
    assert (reference / "tensorboard").is_dir()
    assert {c.step for c in CheckpointStore.of(load_config(reference / "config.yaml")).complete()} >= {5}


def test_dumped_trajectories_are_what_the_metrics_say(reference):
    batch = list(read_trajectories(reference / "rollouts" / "step_0.jsonl.zst"))
    assert len(batch) == 8 * 4
    scores = [t.score for t in batch]
    assert sum(scores) / len(scores) == measured(reference)[0]["rollout/raw_reward"]


@pytest.mark.parametrize("phase", ["rollout", "train", "save"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(runner, reference, phase):
    name = f"killed_in_{phase}"
    process = runner.start(name)
    runner.wait_until(name, process, lambda s: s.get("step", 0) >= 3 and s.get("phase") == phase)
    kill_tree(process, runner.root / name)
    assert runner.finish(name).exists()
    assert measured(runner.root / name) == measured(reference)
    assert evaluations(runner.root / name) == evaluations(reference)
    assert [e["kind"] for e in read_events(runner.root / name)].count("resume") == 1


def test_sigterm_saves_and_the_same_command_goes_on(runner, reference):
    process = runner.start("stopped")
    runner.wait_until("stopped", process, lambda s: s.get("step", 0) >= 3 and s.get("phase") == "rollout")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=TIMEOUT_S) == 0, runner.log("stopped")
    store = CheckpointStore.of(load_config(runner.root / "stopped" / "config.yaml"))
    assert store.newest().step >= 2, "what was done since the last save was saved"
    runner.finish("stopped")
    assert measured(runner.root / "stopped") == measured(reference)


@pytest.mark.parametrize("layout", ["tp", "dp"])
def test_layouts_agree_at_step_0(runner, reference, layout):
    found = measured(runner.finish(layout, f"parallel.{layout}=2", "run.steps=1", "eval.at_start=false"))[0]
    expected = measured(reference)[0]
    for metric in ("rollout/raw_reward", "rollout/response_len/mean", "train/tokens"):
        assert found[metric] == expected[metric]
    for metric in ("train/grad_norm", "train/entropy_loss", "train/train_rollout_logprob_abs_diff"):
        assert found[metric] == pytest.approx(expected[metric], abs=1e-5)


def test_ranks_may_wait_longer_than_a_collective(runner):
    """A rollout of several seconds (a slow reward) under a collective time-out of two."""
    run_dir = runner.finish(
        "patient", "parallel.dp=2", "run.steps=1", "eval.at_start=false", "run.dist_timeout=4s",
        "reward.function=slow_reward:late", "reward.timeout_s=20", "reward.workers=1", "rollout.prompts_per_step=2",
    )  # fmt: skip
    assert view(read_rows(run_dir)).steps[0]["perf/rollout_time"] > 5


def test_replay_gives_the_same_losses_without_an_engine(runner, reference):
    run_dir = runner.finish("replay", options=("--replay", str(reference / "rollouts")))
    for step, row in measured(reference).items():
        again = measured(run_dir)[step]
        assert {k: again[k] for k in again if k.startswith("train/")} == {
            k: row[k] for k in again if k.startswith("train/")
        }
    assert runner.start("replay").wait(timeout=TIMEOUT_S) == 2
    assert "has no place in the order of the prompts" in runner.log("replay")


def test_export_answers_like_the_trained_policy(runner, reference, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["colocate-grpo", "export", str(reference), str(tmp_path / "hf")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    untrained = AutoModelForCausalLM.from_pretrained(runner.demo.model, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), untrained.parameters(), strict=True))
    greedy = runner.finish("greedy", "eval.sets.0.temperature=0", "run.steps=1", "eval.at_start=true",
                           f"model.path={tmp_path / 'hf'}", command="eval")  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for t in list(read_trajectories(greedy / "rollouts" / "eval_held_out_baseline_0.jsonl.zst"))[:8]:
        prompt = [i for i, sampled in zip(t.token_ids, t.loss_mask, strict=True) if not sampled]
        answer = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=48)[0].tolist()
        assert tokenizer.decode(answer) == tokenizer.decode(t.token_ids)


def test_another_identity_is_refused_by_its_keys(runner, reference, capsys, monkeypatch):
    arguments = runner.overrides("reference", "run.seed=7", "rollout.temperature=0.5")
    monkeypatch.setattr("sys.argv", ["colocate-grpo", "train", str(DEMO), *arguments])
    before = (reference / "config.yaml").read_text()
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "run.seed" in line
    assert "rollout.temperature" in line
    assert (reference / "config.yaml").read_text() == before
