"""Sizes out of config.json against transformers' own models, built without memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from colocate_grpo.config import Config, ModelConfig
from colocate_grpo.errors import ConfigError, DataError
from colocate_grpo.hub import HubUnreachable, resolve_model
from colocate_grpo.plan.assessment import make_plan
from colocate_grpo.plan.hardware import GIB, smallest_card
from colocate_grpo.plan.model_shape import rank_tensors, read_model_config, shipped_names
from colocate_grpo.shipped import MODELS
from colocate_grpo.train.shape import ModelShape


@pytest.mark.parametrize("name", shipped_names())
def test_parameters_equal_those_of_transformers(name: str) -> None:
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_hf(read_model_config(f"hf:{name}"))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    padding = (shape.padded_vocab(1) - shape.vocab) * shape.hidden * (1 if shape.tied else 2)
    assert sum(rank_tensors(shape, 1)) == shape.parameters + padding


def plan_of(path: str) -> None:
    make_plan(Config.model_validate({"model": {"path": path}, "data": {"train": "x"}, "run": {"device": "cpu"}}))


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A hub with config.json alone, as long as that file is there, and a cache of its own."""
    directory = tmp_path / "hub"
    directory.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def download(name: str, kind: str, revision: str | None, patterns: list[str]) -> str:
        if not (directory / "config.json").exists():
            raise ConnectionError("no route")
        return str(directory)

    monkeypatch.setattr("colocate_grpo.hub._from_hf", download)
    return directory


def test_unknown_hub_name_without_network_is_one_line_with_the_nearest_shipped_name(hub: Path) -> None:
    with pytest.raises(HubUnreachable, match=r"cannot be reached.*did you mean Qwen3-4B\?") as raised:
        plan_of("hf:Qwen/Qwen3-4b")
    assert "\n" not in str(raised.value)


def test_shape_of_any_hub_model_is_fetched_once_without_weights(hub: Path) -> None:
    content = (MODELS / "Qwen3-0.6B.json").read_text()
    (hub / "config.json").write_text(content)
    plan_of("hf:owner/own-finetune")
    assert read_model_config("hf:owner/own-finetune") == json.loads(content)


def test_a_complete_download_goes_before_a_shipped_shape_of_the_same_name(hub: Path) -> None:
    (hub / "config.json").write_text('{"model_type": "own"}')
    (hub / "model.safetensors").write_bytes(b"")
    resolve_model(ModelConfig(path="hf:owner/Qwen3-4B"))
    assert read_model_config("hf:owner/Qwen3-4B") == {"model_type": "own"}


@pytest.mark.parametrize(("visible", "gib"), [(None, 8), ("0,1", 16), ("0", 24), ("9", None), ("GPU-8f3a", 8)])
def test_plan_reads_the_smallest_card_of_the_run(visible: str | None, gib: int | None, monkeypatch) -> None:
    sizes = [24, 16, 8]
    nvml = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlSystemGetDriverVersion=lambda: "580.1", nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda i: "card", nvmlDeviceGetComputeRunningProcesses=lambda i: [],
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=sizes[i] * GIB, used=0),
    )  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    values = {"model": {"path": "hf:Qwen/Qwen3-0.6B"}, "data": {"train": "x"}, "parallel": {"dp": 4}}
    assert smallest_card(Config.model_validate(values), nvml) == (gib * GIB if gib else None)


def test_missing_directory_and_broken_json_are_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        plan_of(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": \n "qwen3",,}')
    with pytest.raises(DataError, match=r"config.json:2: not JSON"):
        plan_of(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="but a list"):
        plan_of(str(tmp_path))


def test_directory_file_and_hub_name_give_the_same_shape(tmp_path) -> None:
    file = MODELS / "Qwen3-0.6B.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(file.read_text())))
    assert read_model_config(str(tmp_path)) == read_model_config(str(file)) == read_model_config("hf:Qwen/Qwen3-0.6B")
