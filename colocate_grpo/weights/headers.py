"""The tensors of a model directory, told from the headers of its files: no weight is read and no torch imported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from colocate_grpo.errors import DataError
from colocate_grpo.train.shape import ModelShape

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Header:
    """Where a tensor lies, its shape, and its type by safetensors' name."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(model_dir: Path) -> dict[str, Header]:
    """Every tensor by its name. Raises DataError where a file is missing, or is no whole safetensors file."""
    found: dict[str, Header] = {}
    for path in _files(model_dir):
        if not path.is_file():
            raise DataError(f"model.path: {path} is missing (named by {INDEX})")
        try:
            with safe_open(path, framework="numpy") as file:
                names = file.keys()
                pieces = {name: file.get_slice(name) for name in names}
                found |= {n: Header(path, tuple(p.get_shape()), p.get_dtype()) for n, p in pieces.items()}
        except SafetensorError as error:
            raise DataError(f"model.path: {path} is no whole safetensors file ({error})") from error
    return found


def check_headers(headers: Mapping[str, Header], shape: ModelShape, model_dir: Path) -> None:
    """DataError where a tensor of the model is missing, of another shape or no floating-point type, or left over."""
    wanted = dict(tensor_shapes(shape))
    for name, size in wanted.items():
        if name not in headers:
            raise DataError(f"model.path: {model_dir} has no tensor {name!r} in its safetensors files")
        if headers[name].shape != size:
            raise DataError(
                f"model.path: {name} in {headers[name].file} has shape {list(headers[name].shape)}, "
                f"config.json asks for {list(size)}"
            )
        if headers[name].dtype not in FLOATS:
            raise DataError(
                f"model.path: {name} in {headers[name].file} is {headers[name].dtype}; allowed: {', '.join(FLOATS)} "
                "(a quantized model cannot be trained)"
            )
    left_over = sorted(name for name in headers if name not in wanted and not _follows_from_others(name, shape))
    if left_over:
        raise DataError(
            f"model.path: {len(left_over)} tensors of {model_dir} belong to no part of a {shape.family} model of this "
            f"config.json, first {left_over[0]!r}: it would be another model without them"
        )


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every weight."""
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, size in _layer_shapes(shape):
            yield f"model.layers.{layer}.{name}", size
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _layer_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
    rows["v"] = rows["k"]
    for x, size in rows.items():
        yield f"self_attn.{x}_proj.weight", (size, shape.hidden)
        if shape.qkv_bias:
            yield f"self_attn.{x}_proj.bias", (size,)
    yield "self_attn.o_proj.weight", (shape.hidden, rows["q"])
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
    yield "mlp.gate_proj.weight", (shape.ffn, shape.hidden)
    yield "mlp.up_proj.weight", (shape.ffn, shape.hidden)
    yield "mlp.down_proj.weight", (shape.hidden, shape.ffn)
    yield "input_layernorm.weight", (shape.hidden,)
    yield "post_attention_layernorm.weight", (shape.hidden,)


def _follows_from_others(name: str, shape: ModelShape) -> bool:
    """A copy of the tied embedding, or the rotary frequencies that old files hold."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight")


def _files(model_dir: Path) -> list[Path]:
    index, single = model_dir / INDEX, model_dir / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise DataError(f"model.path: {model_dir} has no model.safetensors (nor an index of shards)")
        return [single]
    try:
        return [model_dir / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # no JSON, or none of this form
        raise DataError(f"model.path: {index} is no index of shards ({error!r})") from error
