"""Keys and values of a fixed number of sequences, grown in fixed chunks of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from colocate_grpo.train.shape import ModelShape

CHUNK = 64


def chunked(length: int) -> int:
    """`length` rounded up to whole chunks."""
    return -(-length // CHUNK) * CHUNK


class KvCache:
    """`keys[layer]` and `values[layer]` are [kv_heads, rows, positions, head_dim].

    Never holds a NaN that a masked position could leak (0 * NaN): new memory is zeroed.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, rows: int) -> None:
        self.shape, self.rows, self.positions = shape, rows, 0
        empty = torch.zeros(shape.kv_heads, rows, 0, shape.head_dim, dtype=dtype)
        self.keys = [empty] * shape.layers
        self.values = [empty] * shape.layers

    def reserve(self, length: int) -> None:
        """Make room for `length` positions; what is there stays."""
        wanted = chunked(length)
        if wanted <= self.positions:
            return
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = torch.nn.functional.pad(old, (0, 0, 0, wanted - self.positions))
        self.positions = wanted

    def write(self, layer: int, index_N: Tensor, keys_KND: Tensor, values_KND: Tensor) -> None:
        """Store N tokens; `index_N` is row * positions + position."""
        self.keys[layer].flatten(1, 2).index_copy_(1, index_N, keys_KND)
        self.values[layer].flatten(1, 2).index_copy_(1, index_N, values_KND)

    def copy_rows(self, source: KvCache, source_rows: Tensor, rows: Tensor, length: int) -> None:
        """Copy the first `length` positions of whole rows from another cache."""
        self.reserve(length)
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for target, origin in zip(mine, theirs, strict=True):
                target[:, rows, :length] = origin[:, source_rows, :length]
