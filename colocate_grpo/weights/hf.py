"""Names and layouts of the weights, Megatron <-> Hugging Face, one tensor at a time in both directions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from colocate_grpo.train.shape import ModelShape
from colocate_grpo.weights.headers import Header, check_headers, read_headers


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, cut along `dim` over TP (None: the same on every rank)."""

    name: str
    dim: int | None


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: the Hugging Face tensors whose TP slices are joined into it.

    `join` and `split` work on one rank's slices, in the order of `parts`.
    """

    param: str
    parts: tuple[Part, ...]
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 of the raw bytes: the same for equal bits on any device."""
    # A copy: numpy() forbids resizing the storage that it looks into, and sleeping resizes storages.
    data = tensor.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def entries(shape: ModelShape) -> list[Entry]:
    """Every parameter of the model, in the order of the forward pass."""
    found = [_plain("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0)]
    for layer in range(shape.layers):
        found += _layer_entries(f"decoder.layers.{layer}.", f"model.layers.{layer}.", shape)
    found.append(_plain("decoder.final_layernorm.weight", "model.norm.weight", None))
    if not shape.tied:
        found.append(_plain("output_layer.weight", "lm_head.weight", 0))
    return found


def _layer_entries(ours: str, theirs: str, shape: ModelShape) -> list[Entry]:
    attention, mlp = ours + "self_attention.", ours + "mlp."
    found = [
        _plain(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", None),
        _qkv(attention + "linear_qkv.weight", theirs + "self_attn.{}_proj.weight", shape),
        _plain(attention + "linear_proj.weight", theirs + "self_attn.o_proj.weight", 1),
        _plain(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight", None),
        _gate_up(mlp + "linear_fc1.weight", theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"),
        _plain(mlp + "linear_fc2.weight", theirs + "mlp.down_proj.weight", 1),
    ]
    if shape.qkv_bias:
        found.append(_qkv(attention + "linear_qkv.bias", theirs + "self_attn.{}_proj.bias", shape))
    if shape.qk_norm:
        found.append(_plain(attention + "q_layernorm.weight", theirs + "self_attn.q_norm.weight", None))
        found.append(_plain(attention + "k_layernorm.weight", theirs + "self_attn.k_norm.weight", None))
    return found


def _plain(param: str, name: str, dim: int | None) -> Entry:
    return Entry(param, (Part(name, dim),), join=lambda parts: parts[0], split=lambda tensor: [tensor])


def _gate_up(param: str, gate: str, up: str) -> Entry:
    return Entry(param, (Part(gate, 0), Part(up, 0)), join=torch.cat, split=lambda tensor: list(tensor.chunk(2)))


def _qkv(param: str, pattern: str, shape: ModelShape) -> Entry:
    """Megatron keeps the heads group by group: q q k v | q q k v | ..."""
    rows = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]

    def join(parts: list[Tensor]) -> Tensor:
        grouped = [part.unflatten(0, (-1, size)) for part, size in zip(parts, rows, strict=True)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(tensor: Tensor) -> list[Tensor]:
        grouped = tensor.unflatten(0, (-1, sum(rows)))
        return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]

    return Entry(param, tuple(Part(pattern.format(x), 0) for x in "qkv"), join, split)


class SafetensorsDirectory:
    """The tensors of a model directory by name, read slice by slice from one or many files."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self.headers = headers

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop, cut at the end of the tensor."""
        with safe_open(self._file(name), framework="pt") as file:
            piece = file.get_slice(name)
            return piece[start : min(stop, piece.get_shape()[0])]

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        with safe_open(self._file(name), framework="pt") as file:
            return file.get_slice(name)[:, start:stop]

    def whole(self, name: str) -> Tensor:
        with safe_open(self._file(name), framework="pt") as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name].shape

    def _file(self, name: str) -> Path:
        return self.headers[name].file


@torch.no_grad()
def load_hf(model: torch.nn.Module, shape: ModelShape, model_dir: str | Path, tp_rank: int, tp: int) -> None:
    """Fill this rank's parameters from a model directory; each rank reads only its own slices.

    Raises DataError where the directory's tensors are not exactly those of the model.
    """
    headers = read_headers(Path(model_dir))
    check_headers(headers, shape, Path(model_dir))
    source = SafetensorsDirectory(headers)
    params = dict(model.named_parameters())
    for entry in entries(shape):
        slices = [_read_slice(source, part, tp_rank, tp, shape) for part in entry.parts]
        _copy(params.pop(entry.param), entry.join(slices), entry.param)
    assert not params, f"parameters without a Hugging Face name: {sorted(params)}"


def _read_slice(source: SafetensorsDirectory, part: Part, rank: int, tp: int, shape: ModelShape) -> Tensor:
    if part.dim is None:
        return source.whole(part.name)
    full = source.shape(part.name)[part.dim]
    size = (shape.padded_vocab(tp) if _is_vocab(part.name) else full) // tp
    read = source.rows if part.dim == 0 else source.columns
    return read(part.name, rank * size, (rank + 1) * size)


def _is_vocab(name: str) -> bool:
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def _copy(param: Tensor, values: Tensor, name: str) -> None:
    """Copy; only the padded vocabulary may have rows left over, which are 0."""
    padded = "embedding" in name or "output_layer" in name
    assert param.shape[1:] == values.shape[1:], name
    assert param.shape[0] == values.shape[0] or (padded and param.shape[0] > values.shape[0]), name
    param[: values.shape[0]].copy_(values)
    param[values.shape[0] :].zero_()


def hf_tensors(
    local_tensors: Mapping[str, Tensor], shape: ModelShape, group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) on every rank of the TP group; collective.

    `local_tensors` are this rank's parameters (or gradients) by Megatron name. One is gathered at a time; a
    result may be a view of it.
    """
    for entry in entries(shape):
        for part, local in zip(entry.parts, entry.split(local_tensors[entry.param].detach()), strict=True):
            full = local if part.dim is None else _gather(local, part.dim, group)
            yield part.name, full[: shape.vocab] if _is_vocab(part.name) else full


def _gather(local: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return local
    stacked = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(stacked, local.contiguous(), group=group)
    return stacked if dim == 0 else torch.cat(stacked.chunk(group.size()), dim=dim)


def buckets(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors into lists of at most `max_bytes` (a larger tensor goes alone)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
