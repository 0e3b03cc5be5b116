"""The frozen reference model of the KL term: a host copy of the weights, swapped in for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class ParamBuffer(Protocol):
    param_data: Tensor


class Reference:
    """Keeps the weights as they are now, on the host: it costs no memory on the card."""

    def __init__(self, buffers: Sequence[ParamBuffer]) -> None:
        self.buffers = buffers
        self.kept = [buffer.param_data.to("cpu", copy=True) for buffer in buffers]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model is the reference; afterwards its own weights are back, bit for bit."""
        current = [buffer.param_data.to("cpu", copy=True) for buffer in self.buffers]
        self._write(self.kept)
        try:
            yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.param_data.copy_(value)
