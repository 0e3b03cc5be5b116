"""Sizes out of config.json against transformers' own models, built without memory."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.plan.assessment import make_plan
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


def test_unknown_hub_name_names_the_nearest_shipped_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean Qwen3-4B\?"):
        plan_of("hf:Qwen/Qwen3-4b")


def test_missing_directory_and_broken_json_are_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        plan_of(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": \n "qwen3",,}')
    with pytest.raises(ConfigError, match=r"config.json:2: not JSON"):
        plan_of(str(tmp_path))


def test_directory_file_and_hub_name_give_the_same_shape(tmp_path) -> None:
    file = MODELS / "Qwen3-0.6B.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(file.read_text())))
    assert read_model_config(str(tmp_path)) == read_model_config(str(file)) == read_model_config("hf:Qwen/Qwen3-0.6B")
