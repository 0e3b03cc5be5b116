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
ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
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
        """Read a config.json, of transformers 4 or 5.

        Raises ConfigError for what is not supported, and DataError for sizes that are missing or make no sense.
        """
        family = str(hf.get("model_type", ""))
        _require(family in FAMILIES, "model_type", family, f"one of {sorted(FAMILIES)}{nearest(family, FAMILIES)}")
        _refuse_variants(hf, family)
        heads, hidden = _size(hf, "num_attention_heads"), _size(hf, "hidden_size")
        kv_heads, head_dim = _size(hf, "num_key_value_heads", heads), _size(hf, "head_dim", hidden // heads)
        if heads % kv_heads:
            raise DataError(f"config.json: num_key_value_heads: {kv_heads} does not divide the {heads} heads")
        if head_dim % 2:
            raise DataError(f"config.json: head_dim: {head_dim} is odd, which rotary positions cannot be")
        return cls(
            family=family,
            layers=_size(hf, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=_size(hf, "intermediate_size"),
            vocab=_size(hf, "vocab_size"),
            norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            tied=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2",
            max_positions=_size(hf, "max_position_embeddings", 2048),
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
    return read_config_json(path)


def read_config_json(path: Path) -> dict[str, Any]:
    """The mapping in a config.json. Raises DataError where there is none in it."""
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"model.path: {path}:{error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"model.path: {path}: no UTF-8 text ({error.reason})") from error
    if not isinstance(values, dict):
        raise DataError(f"model.path: {path}: not the configuration of a model, but a {type(values).__name__}")
    return values


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
    answers = {f"eval.sets.{i}.max_new_tokens": s.max_new_tokens or 0 for i, s in enumerate(config.eval.sets)}
    for key, answer in ({"rollout.max_new_tokens": config.rollout.max_new_tokens} | answers).items():
        if config.data.max_prompt_tokens + answer > shape.max_positions:
            raise ConfigError(
                f"{key}: prompt ({config.data.max_prompt_tokens}) + answer ({answer}) may be longer than the "
                f"model's {shape.max_positions} positions"
            )
    return shape


def _divides_all(tp: int, shape: ModelShape) -> bool:
    return not (shape.heads % tp or shape.kv_heads % tp or shape.ffn % tp)


def _require(holds: bool, key: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"config.json: {key}: {value!r} is not supported (allowed: {allowed})")


def _size(hf: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1; `default` where the key is absent or null."""
    value = default if hf.get(key) is None else hf[key]
    if value is None:
        raise DataError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"config.json: {key}: {value!r} must be a whole number >= 1")
    return value


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number over 0; `default` where the key is absent or null."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise DataError(f"config.json: {key}: {value!r} must be a number > 0")
    return value


def _refuse_variants(hf: dict[str, Any], family: str) -> None:
    """Switches inside a family that would silently train another model."""
    _require(hf.get("hidden_act", "silu") == "silu", "hidden_act", hf.get("hidden_act"), "'silu'")
    _require(not hf.get("use_sliding_window"), "use_sliding_window", True, "False")
    _require(not hf.get("mlp_bias"), "mlp_bias", True, "False")
    if family != "qwen2":
        _require(not hf.get("attention_bias"), "attention_bias", True, "False")
    for key in ("quantization_config", "compression_config"):
        method = hf[key].get("quant_method", "?") if isinstance(hf.get(key), dict) else hf.get(key)
        _require(not method, key, method, "weights that are not quantized")
    rope_type = _rope(hf)["rope_type"]
    _require(rope_type in ROPE_TYPES, "rope_type", rope_type, f"one of {list(ROPE_TYPES)}")


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in the form of transformers 5, whichever version wrote the file."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise DataError(f"config.json: rope_parameters: {given!r} must be a mapping")
    rope = dict(given)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    for key in ("rope_theta", *ROPE_NUMBERS.get(str(rope["rope_type"]), ())):
        _number(rope, key)
    return rope
