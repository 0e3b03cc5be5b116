"""The architecture of a model, read from its Hugging Face config.json. Imports neither torch nor Megatron."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError, DataError, nearest

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder-only transformer."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    max_positions: int
    rope: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of trained parameters, padding not counted."""
        qkv_rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = qkv_rows * self.hidden + self.hidden * self.heads * self.head_dim + self.qkv_bias * qkv_rows
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return self.layers * layer + (2 - self.tied) * self.vocab * self.hidden + self.hidden

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding in the trainer; the same for every TP that divides VOCAB_MULTIPLE."""
        multiple = math.lcm(VOCAB_MULTIPLE, tp)
        return -(-self.vocab // multiple) * multiple

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelShape:
        """Read a config.json, of transformers 4 or 5. Raises ConfigError for what is not supported."""
        family = hf.get("model_type", "")
        _require(family in FAMILIES, "model_type", family, f"one of {sorted(FAMILIES)}{nearest(family, FAMILIES)}")
        _refuse_variants(hf, family)
        heads = hf["num_attention_heads"]
        return cls(
            family=family,
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            ffn=hf["intermediate_size"],
            vocab=hf["vocab_size"],
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            tied=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2",
            max_positions=hf.get("max_position_embeddings", 2048),
            rope=_rope(hf),
        )


def read_hf_config(model_dir: str | Path) -> dict[str, Any]:
    """The config.json of a model directory. Raises DataError when there is none."""
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        raise DataError(
            f"model.path: {model_dir} is no directory (give a Hugging Face model directory, or hf:OWNER/NAME)"
        )
    if not path.is_file():
        raise DataError(f"model.path: {model_dir} has no config.json (a Hugging Face model directory is needed)")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error


def validate_model(config: Config, hf: dict[str, Any]) -> ModelShape:
    """The shape of the model if it can be trained under `config.parallel`; else ConfigError."""
    shape, tp = ModelShape.from_hf(hf), config.parallel.tp
    for name, size in (
        ("num_attention_heads", shape.heads),
        ("num_key_value_heads", shape.kv_heads),
        ("intermediate_size", shape.ffn),
    ):
        if size % tp:
            fitting = [n for n in range(1, size + 1) if _divides_all(n, shape)]
            raise ConfigError(f"parallel.tp: {tp} does not divide the model's {name} ({size}); allowed: {fitting}")
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"rollout.max_new_tokens: prompt ({config.data.max_prompt_tokens}) + answer "
            f"({config.rollout.max_new_tokens}) may be longer than the model's {shape.max_positions} positions"
        )
    return shape


def _divides_all(tp: int, shape: ModelShape) -> bool:
    return not (shape.heads % tp or shape.kv_heads % tp or shape.ffn % tp)


def _require(holds: bool, key: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"config.json: {key}: {value!r} is not supported (allowed: {allowed})")


def _refuse_variants(hf: dict[str, Any], family: str) -> None:
    """Switches inside a family that would silently train another model."""
    _require(hf.get("hidden_act", "silu") == "silu", "hidden_act", hf.get("hidden_act"), "'silu'")
    _require(not hf.get("use_sliding_window"), "use_sliding_window", True, "False")
    _require(not hf.get("mlp_bias"), "mlp_bias", True, "False")
    if family != "qwen2":
        _require(not hf.get("attention_bias"), "attention_bias", True, "False")
    rope_type = _rope(hf)["rope_type"]
    _require(rope_type in ROPE_TYPES, "rope_type", rope_type, f"one of {list(ROPE_TYPES)}")


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in the form of transformers 5, whichever version wrote the file."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    return rope
