"""Each check of the configuration can fail; the whole doctor on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Nvml, context, write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from colocate_grpo.config import ModelConfig
from colocate_grpo.doctor import (
    context_length,
    data_files,
    disk,
    host_memory,
    memory_plan,
    model_files,
    shared_memory,
    tokenizer,
)
from colocate_grpo.doctor.command import as_json, examine
from colocate_grpo.hub import resolve_model
from colocate_grpo.shipped import MODELS

SMALLEST = MODELS / "Qwen3-0.6B.json"

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


INDEX = "model.safetensors.index.json"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def finding_of(directory: Path) -> tuple[str, str]:
    finding = model_files.check(context(model={"path": str(directory)}))
    assert "\n" not in finding.what
    return finding.level, finding.what.removeprefix(f"{directory}: ")


def test_a_part_that_is_a_copy_of_another_holds_other_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / PARTS[1]).write_bytes((tmp_path / PARTS[0]).read_bytes())
    what = f"{PARTS[1]} holds other weights than {INDEX} says (1 are not in it, first layer.1)"
    assert finding_of(tmp_path) == ("fail", what)


def test_parts_without_their_index_or_their_whole_number_fail(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = tmp_path / INDEX
    index.write_text(json.dumps({"weight_map": {"layer.0": PARTS[0]}}))
    (tmp_path / PARTS[1]).unlink()
    assert finding_of(tmp_path) == ("fail", f"{PARTS[1]} is missing")
    index.unlink()
    assert finding_of(tmp_path) == ("fail", f"{INDEX} is missing, and 1 of 2 parts are here")


@pytest.mark.parametrize("content", ["", '{"weight_map": {"layer.0"', "[]", "{}", '{"weight_map": {"layer.0": 1}}'])
def test_a_broken_index_is_a_finding(content: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / INDEX).write_text(content)
    level, what = finding_of(tmp_path)
    assert level == "fail"
    assert what.startswith(INDEX)


@pytest.mark.parametrize("content", [b"", b"GIT LFS", b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": {}}'])
def test_a_file_that_is_no_safetensors_is_a_finding(content: bytes, tmp_path: Path) -> None:
    write_model(tmp_path, shards=1)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(content)
    assert finding_of(tmp_path) == ("fail", "model-00001-of-00001.safetensors has no whole header")


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


def test_disk_while_a_running_run_removes_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "old").write_bytes(b"1")
    (run / "kept").write_bytes(b"12345")
    lstat = os.lstat

    def lstat_too_late(path: str) -> os.stat_result:
        (run / "old").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(disk.os, "lstat", lstat_too_late)
    assert disk._size(run) == 5


def test_memory_plan_says_what_fits() -> None:
    assert memory_plan.check(context(Nvml(cards=1))).level == "ok"
    finding = memory_plan.check(context(Nvml(cards=1), model={"path": "hf:Qwen/Qwen3-1.7B"}, rollout={"slots": 16}))
    assert finding.level == "fail"
    assert "train.optimizer.kind=sr_adamw" in finding.how_to_mend


def test_a_check_that_breaks_hides_no_other() -> None:
    machine = context(Nvml(cards=1), model={"path": "nowhere"})
    found = dict(examine(machine))
    assert "nowhere" in found["memory_plan"].what
    assert found["ports"].level == "ok"
    assert as_json(list(found.items()))["ok"] is False


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a hub gives, where there is something in it; the cache is empty at first."""
    directory = tmp_path / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def download(*_: object) -> str:
        if not directory.exists():
            raise ConnectionError("no route")
        return str(directory)

    monkeypatch.setattr("colocate_grpo.hub._from_hf", download)
    return directory


OF_A_MODEL = (memory_plan, host_memory, shared_memory, disk, context_length, model_files, tokenizer)


def test_a_hub_model_of_unknown_shape_is_one_warning(hub: Path, tmp_path: Path) -> None:
    machine = context(Nvml(cards=1), model={"path": "hf:owner/own"}, run={"dir": str(tmp_path / "runs")})
    findings = [check.check(machine) for check in OF_A_MODEL]
    assert [f.level for f in findings] == ["warn"] + ["ok"] * (len(OF_A_MODEL) - 1)
    assert "shape unknown until download" in findings[0].what


def test_a_downloaded_hub_model_is_checked_like_a_directory(hub: Path) -> None:
    write_model(hub)
    write_tokenizer(hub, KEEPS)
    (hub / "config.json").write_text(json.dumps({**json.loads(SMALLEST.read_text()), "vocab_size": 10}))
    resolve_model(ModelConfig(path="hf:owner/own"))
    machine = context(Nvml(cards=1), model={"path": "hf:owner/own"})
    assert memory_plan.check(machine).level == "ok"
    assert "2 weight files complete" in model_files.check(machine).what
    assert "EOS ids" in tokenizer.check(machine).what
    (hub / "tokenizer.json").write_text("")
    resolve_model(ModelConfig(path="hf:owner/own"))  # takes the file as it is now
    assert tokenizer.check(machine).level == "fail"


def test_doctor_without_a_gpu_ends_with_a_list_and_exit_code_1() -> None:
    command = "from colocate_grpo.doctor.command import run_doctor; raise SystemExit(run_doctor(None, json_out=True))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=300)
    answer = json.loads(done.stdout)
    levels = {row["check"]: row["level"] for row in answer["checks"]}
    if levels["gpus"] == "fail":
        assert done.returncode == 1
        assert answer["ok"] is False
    assert len(levels) == 18
    assert all(row["how_to_mend"] for row in answer["checks"] if row["level"] != "ok")
