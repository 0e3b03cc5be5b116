"""What a model directory must hold, told from its headers; every mistake is one line before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import small_models
import torch
from safetensors.torch import load_file, save_file

from colocate_grpo.errors import DataError
from colocate_grpo.train.shape import ModelShape, read_hf_config
from colocate_grpo.weights.export import write_hf
from colocate_grpo.weights.headers import check_headers, read_headers, tensor_shapes
from colocate_grpo.weights.hf import entries, load_hf

Tensors = dict[str, torch.Tensor]
FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write("llama", tmp_path_factory.mktemp("llama"))


def shape_of(model_dir: Path) -> ModelShape:
    return ModelShape.from_hf(read_hf_config(model_dir))


def check(directory: Path, model_dir: Path) -> None:
    check_headers(read_headers(directory), shape_of(model_dir), directory)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_tensors_of_a_family_are_those_that_transformers_makes(family: str) -> None:
    model = small_models.build(family)
    shape = ModelShape.from_hf(json.loads(model.config.to_json_string(use_diff=False)))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shape.tied:
        del expected["lm_head.weight"]
    assert dict(tensor_shapes(shape)) == expected
    assert {part.name for entry in entries(shape) for part in entry.parts} == set(expected)


def rows(count: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = torch.zeros(count, small_models.SIZES["hidden_size"])

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rows(small_models.VOCAB - 10), "has shape [490, 64], config.json asks for [500, 64]"),
        (rows(small_models.VOCAB + 50), "has shape [550, 64], config.json asks for [500, 64]"),
        (lambda t: t.pop(FIRST), f"no tensor '{FIRST}'"),
        (lambda t: t.update({FIRST: t[FIRST].to(torch.float8_e4m3fn)}), "is F8_E4M3; allowed: F64, F32, F16, BF16"),
        (lambda t: t.update({FIRST + "_scale_inv": torch.ones(1)}), "1 tensors of"),
        (lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}), "belong to no part"),
    ],
)
def test_tensors_that_are_not_the_models(
    model_dir: Path, tmp_path: Path, change: Callable[[Tensors], None], said: str
) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=re.escape(said)) as error:
        check(tmp_path, model_dir)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=re.escape(said)):
        load_hf(torch.nn.Module(), shape_of(model_dir), tmp_path, 0, 1)


def test_what_follows_from_others_may_lie_beside_them(tmp_path: Path) -> None:
    source = small_models.write("qwen3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    check(tmp_path, source)


def test_files_that_are_missing_or_broken(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        check(tmp_path, model_dir)
    whole = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="is no whole safetensors file"):
        check(tmp_path, model_dir)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {FIRST: "model-00001-of-00002.safetensors"}}))
    with pytest.raises(DataError, match=r"model-00001-of-00002\.safetensors is missing"):
        check(tmp_path, model_dir)
    for content in ("[]", "{", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        with pytest.raises(DataError, match="is no index of shards"):
            check(tmp_path, model_dir)


def test_shards_are_read_together(model_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    write_hf(iter(tensors.items()), model_dir, tmp_path / "out")
    check(tmp_path / "out", model_dir)
