"""Keys and values of a fixed number of sequences, grown in fixed chunks of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colocate_grpo.train.shape import ModelShape

CHUNK = 64


def chunks_of(length: int) -> int:
    """Chunks that hold `length` positions."""
    return -(-length // CHUNK)


class KvCache:
    """`keys(layer)` and `values(layer)` are [chunks, rows, kv_heads, CHUNK, head_dim].

    A chunk of all rows lies together: attention reads most often the first one alone, and reads it in one piece.
    Never holds a NaN that a masked position could leak (0 * NaN): new memory is zeroed.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, rows: int) -> None:
        self._data = torch.zeros(0, shape.layers, 2, rows, shape.kv_heads, CHUNK, shape.head_dim, dtype=dtype)

    @property
    def chunks(self) -> int:
        return len(self._data)

    def keys(self, layer: int) -> Tensor:
        return self._data[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        return self._data[:, layer, 1]

    def reserve(self, length: int) -> None:
        """Make room for `length` positions; what is there stays."""
        more = chunks_of(length) - self.chunks
        if more > 0:
            self._data = torch.cat([self._data, self._data.new_zeros(more, *self._data.shape[1:])])

    def places(self, positions_BQ: Tensor) -> Tensor:
        """Where `write` stores token q of row b: index [B * Q * 2 * kv_heads], each key head, then each value head."""
        _, layers, _, rows, heads, _, _ = self._data.shape
        positions = positions_BQ[..., None, None]
        chunk = positions.div(CHUNK, rounding_mode="floor") * (layers * 2 * rows * heads)
        kind = torch.arange(2).view(2, 1) * (rows * heads)
        row = torch.arange(len(positions)).view(-1, 1, 1, 1) * heads
        return ((chunk + kind + row + torch.arange(heads)) * CHUNK + positions % CHUNK).flatten()

    def write(self, layer: int, places: Tensor, keys_values_NHD: Tensor) -> None:
        """Store N tokens, each the keys of all heads, then the values."""
        dim = self._data.shape[-1]
        cells = self._data.view(-1, dim)[layer * self._data[0, 0].numel() // dim :]
        cells.index_copy_(0, places, keys_values_NHD.reshape(-1, dim))

    def copy_rows(self, source: KvCache, source_rows: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy at least the first `length` positions of whole rows from another cache, or from this one."""
        self.reserve(length)
        some, positions = chunks_of(length), min(length, CHUNK)
        self._data[:some, :, :, rows, :, :positions] = source._data[:some, :, :, source_rows, :, :positions]
