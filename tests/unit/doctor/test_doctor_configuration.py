"""Each check of the configuration can fail; the whole doctor on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Nvml, context, write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from colocate_grpo.doctor import context_length, data_files, disk, memory_plan, model_files, tokenizer
from colocate_grpo.doctor.command import as_json, examine

KEEPS = "{% for m in messages %}{{ m.content }}{% endfor %}"
DROPS = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def write_tokenizer(directory: Path, template: str | None, eos: str = "<eos>") -> None:
    vocabulary = {word: i for i, word in enumerate(["a", "<eos>", "<end>", "b"])}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), eos_token=eos, pad_token="b"
    )
    made.chat_template = template
    made.save_pretrained(directory)


def test_complete_model_then_a_missing_file_then_a_cut_one(tmp_path: Path) -> None:
    machine = context(model={"path": str(write_model(tmp_path))})
    assert model_files.check(machine).level == "ok"
    shard = tmp_path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    assert "its header says" in model_files.check(machine).what
    shard.write_bytes(content[:5])
    assert model_files.check(machine).level == "fail"
    shard.unlink()
    assert f"{shard.name} is missing" in model_files.check(machine).what


def test_tokenizer_says_eos_ids_reasoning_and_thinking(tmp_path: Path) -> None:
    machine = context(
        model={"path": str(write_model(tmp_path))}, data={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert tokenizer.check(machine).level == "fail"
    write_tokenizer(tmp_path, DROPS)
    finding = tokenizer.check(machine)
    assert finding.level == "ok"
    assert "EOS ids [1, 2] (<eos>, <end>)" in finding.what
    assert "drops earlier reasoning; thinking off" in finding.what
    write_tokenizer(tmp_path, KEEPS)
    assert "keeps earlier reasoning; no thinking switch" in tokenizer.check(machine).what


def test_eos_outside_the_vocabulary_fails(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path), KEEPS)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 151645}))
    assert "outside the vocabulary" in tokenizer.check(context(model={"path": str(tmp_path)})).what


def test_context_length_of_training_and_evaluation() -> None:
    assert context_length.check(context()).level == "ok"
    assert context_length.check(context(rollout={"max_new_tokens": 60_000})).level == "fail"
    sets = {"sets": [{"name": "long", "path": "x", "max_new_tokens": 40_000}]}
    finding = context_length.check(context(eval=sets))
    assert finding.level == "fail"
    assert "eval.sets.0.max_new_tokens: 41,024" in finding.what


def test_data_files(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    machine = context(data={"train": str(path)})
    assert data_files.check(machine).level == "fail"
    path.write_text('{"prompt": "1+1", "label": "2"}\n')
    assert data_files.check(machine).what == f"{path}: 1 rows"
    path.write_text('{"prompt": "1+1", "label": "2"}\n{"prompt": \n')
    assert "line 2" in data_files.check(machine).what
    path.write_text("")
    assert data_files.check(machine).level == "fail"


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = context(run={"dir": str(tmp_path / "runs" / "x")})
    for free_gib, level in ((1000, "ok"), (18, "warn"), (10, "fail")):
        monkeypatch.setattr(
            disk.shutil, "disk_usage", lambda path, free=free_gib: type("Usage", (), {"free": free * 2**30})
        )
        assert disk.check(machine).level == level


def test_memory_plan_says_what_fits() -> None:
    assert memory_plan.check(context(Nvml(cards=1))).level == "ok"
    finding = memory_plan.check(context(Nvml(cards=1), model={"path": "hf:Qwen/Qwen3-1.7B"}, rollout={"slots": 16}))
    assert finding.level == "fail"
    assert "train.optimizer.kind=sr_adamw" in finding.how_to_mend


def test_a_check_that_breaks_hides_no_other() -> None:
    machine = context(Nvml(cards=1), model={"path": "hf:Qwen/NoSuchModel"})
    found = dict(examine(machine))
    assert "NoSuchModel" in found["memory_plan"].what
    assert found["ports"].level == "ok"
    assert as_json(list(found.items()))["ok"] is False


def test_doctor_without_a_gpu_ends_with_a_list_and_exit_code_1() -> None:
    command = "from colocate_grpo.doctor.command import run_doctor; raise SystemExit(run_doctor(None, json_out=True))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=300)
    answer = json.loads(done.stdout)
    levels = {row["check"]: row["level"] for row in answer["checks"]}
    if levels["gpus"] == "fail":
        assert done.returncode == 1
        assert answer["ok"] is False
    assert len(levels) == 15
    assert all(row["how_to_mend"] for row in answer["checks"] if row["level"] != "ok")
