"""The shape of a model from its config.json; what cannot be trained is refused with the key to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_models

from colocate_grpo.errors import ConfigError, DataError
from colocate_grpo.train.shape import ModelShape, read_hf_config, validate_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}


def config(**parallel: int) -> Any:
    return small_models.make_config(Path("model"), parallel=parallel)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_reads_what_transformers_writes(family: str) -> None:
    model = small_models.build(family)
    shape = ModelShape.from_hf(json.loads(model.config.to_json_string(use_diff=False)))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.head_dim, shape.kv_heads, shape.tied) == (16, 4, family != "llama")
    assert shape.rope["rope_type"] == ("llama3" if family == "llama" else "default")


def test_reads_files_of_transformers_4() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": None}
    shape = ModelShape.from_hf(old)
    assert shape.rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert shape.kv_heads == 8
    assert shape.head_dim == 8


def test_padded_vocabulary_is_the_same_under_every_tp() -> None:
    shape = ModelShape.from_hf(LLAMA)
    assert {shape.padded_vocab(tp) for tp in (1, 2, 4, 8)} == {512}
    assert shape.padded_vocab(3) == 576


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen33"}, "did you mean qwen3?"),
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "'fp8' is not supported"),
        ({"compression_config": {"format": "int"}}, "compression_config"),
    ],
)
def test_unsupported_architecture(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_model(config(), LLAMA | change)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"hidden_size": "64"}, "hidden_size: '64' must be a whole number >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 must be a whole number >= 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: 0 must be a whole number >= 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 8 heads"),
        ({"vocab_size": 500.0}, "vocab_size: 500.0"),
        ({"intermediate_size": True}, "intermediate_size: True"),
        ({"head_dim": 9}, "head_dim: 9 is odd"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: '1e-6' must be a number > 0"),
        ({"rope_theta": []}, "rope_theta: []"),
        ({"rope_scaling": [1]}, "rope_parameters: [1] must be a mapping"),
        ({"rope_scaling": {"type": "linear"}}, "factor: None must be a number > 0"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_sizes_that_make_no_sense(change: dict[str, Any], said: str) -> None:
    with pytest.raises((DataError, ConfigError)) as error:
        ModelShape.from_hf(LLAMA | change)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("tp", "said"), [(3, "num_attention_heads (8)"), (4, "num_key_value_heads (2)")])
def test_tp_that_does_not_divide(tp: int, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_model(config(tp=tp), LLAMA)
    assert said in str(error.value)
    assert "allowed: [1, 2]" in str(error.value)


def test_longer_than_the_model_can_see() -> None:
    with pytest.raises(ConfigError, match="512 positions"):
        validate_model(config(), LLAMA | {"max_position_embeddings": 512})
    sets = [{"name": "a", "path": "a"}, {"name": "b", "path": "b", "max_new_tokens": 3073}]
    longer = small_models.make_config(Path("model"), eval={"sets": sets})
    with pytest.raises(ConfigError, match=r"eval\.sets\.1\.max_new_tokens: prompt \(1024\) \+ answer \(3073\)"):
        validate_model(longer, LLAMA)


def test_directory_without_or_with_a_broken_config(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{\n"a": }')
    with pytest.raises(DataError, match=r"config\.json:2"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="but a list"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{}")
    with pytest.raises(DataError, match="no UTF-8 text"):
        read_hf_config(tmp_path)
