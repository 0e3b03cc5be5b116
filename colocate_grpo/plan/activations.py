"""Peak of the trainer's activations in one micro-batch: a simulation of what autograd keeps and when it lets go.

Every operator of a layer is written down with what it saves for backward, what its backward allocates on top, and
the size of the gradients that flow. The peak is the largest moment of: forward, fused log-prob, backward of the
layers (after computing each layer again, under recompute). Two sets of kernels differ: `fused` (CUDA) and
`composite` (CPU, where a norm keeps fp32 copies).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from colocate_grpo.plan.model_shape import kv_width, query_width
from colocate_grpo.train.shape import ModelShape

FP32 = 4
Kernels = Literal["fused", "composite"]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of `tokens` on one rank; `element` is bytes of an activation, `chunk` tokens of a log-prob."""

    tokens: int
    tp: int
    sequence_parallel: bool
    element: int
    chunk: int
    recompute: bool
    kernels: Kernels
    grad_element: int = FP32

    @property
    def rows(self) -> int:
        """Tokens of this rank outside the tensor parallel regions."""
        return self.padded // self.tp if self.sequence_parallel and self.tp > 1 else self.padded

    @property
    def padded(self) -> int:
        return -(-self.tokens // self.tp) * self.tp

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.tp > 1


@dataclass(frozen=True)
class Op:
    """`saved` bytes live from forward to the end of its backward; in backward it also holds `transient` bytes,
    while `incoming` is the gradient of its output and `outgoing` that of its inputs."""

    name: str
    saved: int
    incoming: int
    outgoing: int
    transient: int = 0
    forward_transient: int = 0


def activation_peak(shape: ModelShape, batch: MicroBatch) -> int:
    """Bytes at the worst moment of forward and backward of one micro-batch, weights and gradients not counted."""
    kept = _kept_between_layers(shape, batch)
    layer = layer_ops(shape, batch)
    saved = sum(op.saved for op in layer)
    inside = saved + _output(shape, batch)
    stack = kept * shape.layers if batch.recompute else saved * shape.layers
    ends = _tables(shape, batch) + _final_norm(shape, batch)
    head = stack + ends + max(_head_forward(shape, batch), _head_backward(shape, batch))
    forward = stack + _tables(shape, batch) + max(inside if batch.recompute else 0, _forward_transient(layer))
    below = stack if batch.recompute else stack - saved
    body = below + _tables(shape, batch) + max(backward_moments(layer))
    return max(head, forward, body)


def backward_moments(ops: Sequence[Op]) -> Iterator[int]:
    """Live bytes during the backward of each operator of a layer, last operator first."""
    held = sum(op.saved for op in ops)
    for op in reversed(ops):
        yield held + op.incoming + op.outgoing + op.transient
        held -= op.saved


def _forward_transient(ops: Sequence[Op]) -> int:
    return max(op.forward_transient for op in ops)


def _kept_between_layers(shape: ModelShape, batch: MicroBatch) -> int:
    """Input of a layer, which full recompute keeps."""
    return batch.rows * shape.hidden * batch.element


def _output(shape: ModelShape, batch: MicroBatch) -> int:
    return batch.rows * shape.hidden * batch.element


def _tables(shape: ModelShape, batch: MicroBatch) -> int:
    """cos and sin of every token."""
    return 2 * batch.padded * shape.head_dim * batch.element


def _final_norm(shape: ModelShape, batch: MicroBatch) -> int:
    return _norm("final", batch.rows, shape.hidden, batch).saved + _output(shape, batch)


def layer_ops(shape: ModelShape, batch: MicroBatch) -> list[Op]:
    """The operators of one transformer layer in forward order."""
    e, t, s, h = batch.element, batch.padded, batch.rows, shape.hidden
    q, k, f = query_width(shape, batch.tp), kv_width(shape, batch.tp), shape.ffn // batch.tp
    wide, full = s * h * e, t * h * e
    gathered = full if batch.gathers else 0
    heads = q // shape.head_dim
    norms = [
        _norm("q_norm", t * heads, shape.head_dim, batch, residual=False),
        _norm("k_norm", t * k // shape.head_dim, shape.head_dim, batch, residual=False),
    ]
    residual = wide
    return [
        _norm("input_norm", s, h, batch, held=residual),
        _linear("qkv", wide, t * (q + 2 * k) * e, full, h * (q + 2 * k) * e, gathered, residual),
        *(norms if shape.qk_norm else []),
        Op("rotary", t * (q + k) * e, t * (q + k) * e, t * (q + k) * e, 3 * t * q * e + residual),
        Op("attention", t * (q + q + 2 * k) * e + t * heads * FP32, t * q * e, t * (q + 2 * k) * e, residual),
        _linear("proj", 0, full, t * q * e, h * q * e, 0, residual),
        _norm("mlp_norm", s, h, batch, held=residual),
        _linear("fc1", wide, 2 * t * f * e, full, 2 * h * f * e, gathered, residual),
        Op("glu", 4 * t * f * e, t * f * e, 2 * t * f * e, 2 * t * f * e + residual),
        _linear("fc2", t * f * e, full, t * f * e, h * f * e, 0, residual),
    ]


def _norm(name: str, rows: int, width: int, batch: MicroBatch, residual: bool = True, held: int = 0) -> Op:
    size = rows * width
    if batch.kernels == "fused":
        return Op(name, size * batch.element * residual + rows * FP32, size * batch.element, size * batch.element, held)
    copies = 2 if batch.element != FP32 else 1
    return Op(
        name, copies * size * FP32 + rows * FP32, size * batch.element, size * batch.element, held + 3 * size * FP32
    )


def _linear(name: str, saved: int, incoming: int, outgoing: int, weight: int, gathered: int, held: int) -> Op:
    return Op(name, saved, incoming, outgoing, weight + gathered + held, gathered)


def _head_forward(shape: ModelShape, batch: MicroBatch) -> int:
    """The fused log-prob, forward: logits of one chunk and what is left of the one before."""
    chunk, cells = _chunk_cells(shape, batch)
    copies = (2 * FP32 + batch.element) if batch.tokens > chunk else 2 * FP32
    return cells * copies + chunk * shape.hidden * batch.element + _gathered_hidden(shape, batch)


def _head_backward(shape: ModelShape, batch: MicroBatch) -> int:
    chunk, cells = _chunk_cells(shape, batch)
    e, hidden = batch.element, batch.padded * shape.hidden
    weight = shape.padded_vocab(batch.tp) // batch.tp * shape.hidden
    product = cells * (FP32 + e) + weight * e
    loop = cells * (2 * FP32 + 2 * e) if batch.tokens > chunk else 2 * cells * FP32
    return max(product, loop) + chunk * shape.hidden * e + hidden * e + _gathered_hidden(shape, batch)


def _chunk_cells(shape: ModelShape, batch: MicroBatch) -> tuple[int, int]:
    chunk = min(batch.chunk, batch.tokens)
    return chunk, chunk * shape.padded_vocab(batch.tp) // batch.tp


def _gathered_hidden(shape: ModelShape, batch: MicroBatch) -> int:
    return batch.padded * shape.hidden * batch.element if batch.gathers else 0
