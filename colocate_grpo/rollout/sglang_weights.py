"""Weights on their way into an SGLang server, and what the server should then hold.

A bucket travels as handles to shared memory (CPU) or to device memory (CUDA IPC), never as bytes over HTTP.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing

from colocate_grpo.weights.hf import tensor_checksum

Bucket = Sequence[tuple[str, torch.Tensor]]
ALIGNMENT = 16
VOCABULARY_PADDING = 64
CPU_INTERMEDIATE_PADDING = 32


def flatten_bucket(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The same tensors as views of one new piece of memory: a single handle to open."""
    offsets, end = [], 0
    for _, tensor in bucket:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(end, dtype=torch.uint8, device=bucket[0][1].device)
    views = []
    for (name, tensor), start in zip(bucket, offsets, strict=True):
        view = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        views.append((name, view.copy_(tensor.detach())))
    return views


def serialize_views(views: Bucket) -> bytes:
    """Handles to `views` (from `flatten_bucket`), for exactly one receiver: opening them consumes a reference."""
    buffer = io.BytesIO()
    if views[0][1].is_cuda:
        _name_devices_by_uuid()
        ForkingPickler(buffer).dump(list(views))
    else:
        with _named_shared_memory():
            ForkingPickler(buffer).dump(list(views))
    return buffer.getvalue()


def as_text(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


@contextmanager
def _named_shared_memory() -> Iterator[None]:
    """torch's default hands over file descriptors, which only a related process can take: the server would die."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _name_devices_by_uuid() -> None:
    """The receiver numbers its cards differently; SGLang's workers understand a UUID in place of the number."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()


class ShardLayout:
    """How SGLang lays a dense Llama or Qwen model out over TP: fused projections, padded vocabulary."""

    FUSED = (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    )
    VOCABULARY = ("embed_tokens.weight", "lm_head.weight")

    def __init__(self, model_dir: Path, tp: int, device: str):
        shape = json.loads((model_dir / "config.json").read_text())
        self.tp, self.device = tp, device
        self.kv_heads = shape.get("num_key_value_heads", shape["num_attention_heads"])

    def target(self, name: str) -> tuple[str, tuple[str, ...]]:
        """(SGLang's parameter, the Hugging Face tensors it is joined from) for a Hugging Face name."""
        for fused, parts in self.FUSED:
            for part in parts:
                if f".{part}." in name:
                    sources = tuple(name.replace(f".{part}.", f".{p}.") for p in parts)
                    return name.replace(f".{part}.", f".{fused}."), sources
        return name, (name,)

    def shard(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What rank `rank` keeps of the full tensor `name`."""
        if name.endswith(self.VOCABULARY):
            return _padded(tensor, 0, VOCABULARY_PADDING).chunk(self.tp, dim=0)[rank]
        if ".k_proj." in name or ".v_proj." in name:
            pieces = min(self.tp, self.kv_heads)  # fewer KV heads than ranks: neighbours share one
            return tensor.chunk(pieces, dim=0)[rank * pieces // self.tp]
        if ".gate_proj." in name or ".up_proj." in name:
            return _padded(tensor, 0, self._intermediate_padding).chunk(self.tp, dim=0)[rank]
        if name.endswith("down_proj.weight"):
            return _padded(tensor, 1, self._intermediate_padding).chunk(self.tp, dim=1)[rank]
        if name.endswith("o_proj.weight"):
            return tensor.chunk(self.tp, dim=1)[rank]
        return tensor.chunk(self.tp, dim=0)[rank] if ".q_proj." in name else tensor

    @property
    def _intermediate_padding(self) -> int:
        return CPU_INTERMEDIATE_PADDING * self.tp if self.device == "cpu" else 1


def _padded(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Zeros at the end of `dim`, up to a multiple."""
    missing = -tensor.shape[dim] % multiple
    padding = (0, 0) * (tensor.dim() - 1 - dim) + (0, missing)
    return torch.nn.functional.pad(tensor, padding)


class ExpectedShards:
    """Collects a push, and predicts the checksum of every parameter on every TP rank of the server.

    A fused parameter is hashed as soon as its last part has come; until then clones of its parts are held.
    """

    def __init__(self, layout: ShardLayout):
        self.layout = layout
        self.full: dict[str, str] = {}
        self.shards: dict[str, list[str]] = {}
        self._waiting: dict[str, torch.Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            self.full[name] = tensor_checksum(tensor)
            parameter, sources = self.layout.target(name)
            self._waiting[name] = tensor if len(sources) == 1 else tensor.detach().clone()
            if all(source in self._waiting for source in sources):
                parts = [(source, self._waiting.pop(source)) for source in sources]
                self.shards[parameter] = [self._hash(parts, rank) for rank in range(self.layout.tp)]

    def compare(self, found: Sequence[dict[str, str]]) -> dict[str, str]:
        """Hugging Face name -> checksum of what the server holds: the pushed one where all its ranks agree with it.

        `found`: the server's checksums by its own names, one dictionary a TP rank.
        """
        names = {name: self.layout.target(name)[0] for name in self.full}
        unknown = {n: "never pushed" for rank in found for n in rank if n not in names.values()}
        held = {n: p for n, p in names.items() if p in found[0]}  # a tied lm_head has no parameter of its own
        differing = {p for p in held.values() if [rank[p] for rank in found] != self.shards.get(p)}
        return unknown | {n: self.full[n] if p not in differing else f"differs in {p}" for n, p in held.items()}

    def _hash(self, parts: Iterable[tuple[str, torch.Tensor]], rank: int) -> str:
        return _server_hash(torch.cat([self.layout.shard(name, tensor, rank) for name, tensor in parts]))


def _server_hash(tensor: torch.Tensor) -> str:
    """The checksum that SGLang's `/weights_checker` reports for a tensor on this kind of device."""
    if tensor.is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash

        return f"{tensor_hash(tensor):016x}"
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]
