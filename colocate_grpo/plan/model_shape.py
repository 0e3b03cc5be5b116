"""Sizes that memory and time follow from, out of a `config.json` alone: tensors of a rank, KV bytes, FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colocate_grpo.config import ModelConfig
from colocate_grpo.errors import ConfigError, nearest
from colocate_grpo.hub import downloaded_model, fetch_model_config
from colocate_grpo.shipped import MODELS
from colocate_grpo.train.shape import ModelShape, read_config_json

HUBS = ("hf:", "modelscope:")


def read_model_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """config.json of `model.path`: a directory, a json file, or a hub name."""
    return read_config_json(find_config_json(path, revision))


def find_config_json(path: str, revision: str | None = None) -> Path:
    """The config.json that describes `model.path`; ConfigError where there is none. Downloads no weights."""
    if path.startswith(HUBS):
        return _hub_config(ModelConfig(path=path, revision=revision))
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if file.is_file():
        return file
    # A model that a command has yet to make (the demo's) is shipped under the name of its directory.
    to_be_made = MODELS / f"{file.parent.name}.json"
    if file.parent.name and to_be_made.is_file():
        return to_be_made
    raise ConfigError(f"model.path: {file} does not exist")


def shipped_names() -> list[str]:
    """Models whose config.json is shipped, so that `plan` needs no network."""
    return sorted(p.stem for p in MODELS.glob("*.json"))


def _hub_config(model: ModelConfig) -> Path:
    """Of the download where it is complete, else the shipped one of that name, else fetched."""
    if directory := downloaded_model(model):
        return directory / "config.json"
    name, known = model.path.partition(":")[2].rsplit("/", 1)[-1], shipped_names()
    if name in known:
        return MODELS / f"{name}.json"
    try:
        return fetch_model_config(model)
    except ConfigError as error:
        raise type(error)(
            f"{error}; the shape of {model.path} is not shipped{nearest(name, known)}: "
            f"give its config.json instead, or one of {', '.join(known)}"
        ) from error


def rank_tensors(shape: ModelShape, tp: int) -> Iterator[int]:
    """Elements of each parameter tensor of one trainer rank, in Megatron's order of registration."""
    embedding = shape.padded_vocab(tp) // tp * shape.hidden
    yield embedding
    for _ in range(shape.layers):
        yield from _layer_tensors(shape, tp)
    yield shape.hidden
    if not shape.tied:
        yield embedding


def _layer_tensors(shape: ModelShape, tp: int) -> Iterator[int]:
    query, fused = query_width(shape, tp), query_width(shape, tp) + 2 * kv_width(shape, tp)
    yield shape.hidden
    yield query * shape.hidden
    yield fused * shape.hidden
    if shape.qkv_bias:
        yield fused
    if shape.qk_norm:
        yield from (shape.head_dim, shape.head_dim)
    yield shape.hidden
    yield 2 * shape.ffn // tp * shape.hidden
    yield shape.ffn // tp * shape.hidden


def query_width(shape: ModelShape, tp: int) -> int:
    """Columns of the queries on one rank."""
    return shape.heads * shape.head_dim // tp


def kv_width(shape: ModelShape, tp: int) -> int:
    """Columns of the keys on one rank; an engine with more ranks than heads repeats heads."""
    return max(1, shape.kv_heads // tp) * shape.head_dim


def kv_bytes_per_token(shape: ModelShape, tp: int, element_bytes: int) -> int:
    """Bytes of keys and values that one token takes on one card of an engine."""
    return 2 * shape.layers * kv_width(shape, tp) * element_bytes


def engine_parameters(shape: ModelShape, tp: int) -> int:
    """Parameters on one card of an engine (vocabulary padded to 64, as SGLang does)."""
    embedding = math.ceil(shape.vocab / math.lcm(64, tp)) * math.lcm(64, tp) // tp * shape.hidden
    layers = shape.layers * sum(_layer_tensors(shape, tp))
    return embedding * (1 if shape.tied else 2) + layers + shape.hidden


def forward_flops(shape: ModelShape, tokens: float, mean_context: float) -> float:
    """FLOPs of one forward pass over `tokens`, each attending to `mean_context` tokens on average, head included."""
    matrix = shape.layers * sum(n for n in _layer_tensors(shape, 1) if n > 16 * shape.hidden)
    head = shape.vocab * shape.hidden
    attention = 2 * shape.layers * shape.heads * shape.head_dim * mean_context
    return 2 * tokens * (matrix + head + attention)
