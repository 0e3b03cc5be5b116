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
    """One micro-batch of `tokens` on one rank; `element` is bytes of an activation, `chunk` tokens of a log-prob.

    `entropy`: the loss uses it. Without `fp32_gradients` the output layer's gradient is collected beside them.
    """

    tokens: int
    tp: int
    sequence_parallel: bool
    element: int
    chunk: int
    recompute: bool
    kernels: Kernels
    entropy: bool = False
    fp32_gradients: bool = True

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
    layer = layer_ops(shape, batch)
    saved, wide = sum(op.saved for op in layer), _wide(shape, batch)
    stack = shape.layers * (wide if batch.recompute else saved)
    always = _tables(shape, batch) + _results(batch)
    last = _norm("final", batch.rows, shape.hidden, batch, 0).saved + wide
    head = stack + last + max(_head_forward(shape, batch), _head_backward(shape, batch))
    # Recompute holds the layer's output and the gradient it was called with until the layer is done.
    held = 2 * wide if batch.recompute else wide - saved
    body = stack + held + max(backward_moments(layer))
    forward = stack + max(op.forward_transient for op in layer) + (saved if batch.recompute else 0)
    return always + max(head, body, forward)


def backward_moments(ops: Sequence[Op]) -> Iterator[int]:
    """Live bytes during the backward of each operator of a layer, last operator first."""
    held = sum(op.saved for op in ops)
    for op in reversed(ops):
        yield held + op.incoming + op.outgoing + op.transient
        held -= op.saved


def _wide(shape: ModelShape, batch: MicroBatch) -> int:
    """Hidden states between layers, on this rank."""
    return batch.rows * shape.hidden * batch.element


def _tables(shape: ModelShape, batch: MicroBatch) -> int:
    """cos and sin of every token."""
    return 2 * batch.padded * shape.head_dim * batch.element


def _results(batch: MicroBatch) -> int:
    """Log-prob and entropy of every token, in fp32."""
    return 2 * batch.tokens * FP32


def layer_ops(shape: ModelShape, batch: MicroBatch) -> list[Op]:
    """The operators of one transformer layer in forward order."""
    return [*_attention_ops(shape, batch), *_mlp_ops(shape, batch)]


def _attention_ops(shape: ModelShape, batch: MicroBatch) -> list[Op]:
    e, t, wide = batch.element, batch.padded, _wide(shape, batch)
    full = t * shape.hidden * e
    q, k = query_width(shape, batch.tp), kv_width(shape, batch.tp)
    heads, kv_heads = q // shape.head_dim, k // shape.head_dim
    fused, gathered = q + 2 * k, full if batch.gathers else 0
    # What the residual stream's gradient takes while the attention branch is worked on.
    residual = wide
    norms = [
        # Queries of several groups are copied out of the projection, those of one group and keys are views of it.
        _head_norm("q_norm", t * heads, shape.head_dim, batch, residual + 2 * t * k * e, is_view=kv_heads == 1),
        _head_norm("k_norm", t * kv_heads, shape.head_dim, batch, residual + t * fused * e, is_view=True),
    ]
    return [
        _norm(
            "input_norm", batch.rows, shape.hidden, batch, residual, kept_elsewhere=_checkpointed_input(shape, batch)
        ),
        Op("qkv", wide, t * fused * e, full, shape.hidden * fused * e + gathered + residual, gathered + t * fused * e),
        *(norms if shape.qk_norm else []),
        Op("rotary", t * (q + k) * e, t * fused * e, t * q * e, t * q * e + residual),
        Op("attention", t * (q + fused) * e + t * heads * FP32, t * q * e, t * fused * e, residual),
        Op("proj", 0, gathered, t * q * e, shape.hidden * q * e + residual),
    ]


def _mlp_ops(shape: ModelShape, batch: MicroBatch) -> list[Op]:
    e, t, wide = batch.element, batch.padded, _wide(shape, batch)
    f, full = shape.ffn // batch.tp, t * shape.hidden * e
    gathered = full if batch.gathers else 0
    return [
        _norm("mlp_norm", batch.rows, shape.hidden, batch, 0),
        Op("fc1", wide, 2 * t * f * e, full, 2 * shape.hidden * f * e + gathered, gathered),
        Op("glu", 2 * t * f * e, t * f * e, 2 * t * f * e, t * f * e),
        Op("fc2", t * f * e, gathered, t * f * e, shape.hidden * f * e, full),
    ]


def _checkpointed_input(shape: ModelShape, batch: MicroBatch) -> int:
    """Recompute keeps the layer's input, which its first norm saves again, unless that makes an fp32 copy of it."""
    copies = batch.kernels == "composite" and batch.element != FP32
    return _wide(shape, batch) if batch.recompute and not copies else 0


def _norm(name: str, rows: int, width: int, batch: MicroBatch, held: int, kept_elsewhere: int = 0) -> Op:
    """A composite norm saves its input and its normalised input in fp32, and works with four such copies."""
    size, e = rows * width, batch.element
    if batch.kernels == "fused":
        return Op(name, size * e + rows * FP32 - kept_elsewhere, size * e, size * e, held)
    return Op(name, 2 * size * FP32 + rows * FP32 - kept_elsewhere, 0, 0, held + 4 * size * FP32)


def _head_norm(name: str, rows: int, width: int, batch: MicroBatch, held: int, is_view: bool) -> Op:
    """Norm of queries or keys. `is_view`: its input is a part of the fused projection, kept for the values anyway."""
    size, e = rows * width, batch.element
    if batch.kernels == "fused":
        return Op(name, rows * FP32, size * e, size * e, held)
    copies = 1 if e == FP32 and is_view else 2
    return Op(name, copies * size * FP32 + rows * FP32, size * e, 0, held + 3 * size * FP32)


def _head_forward(shape: ModelShape, batch: MicroBatch) -> int:
    """The fused log-prob, forward: logits of one chunk and what is left of the one before."""
    chunk, cells = _chunk_cells(shape, batch)
    cast = batch.element if batch.element != FP32 else 0
    copies = 2 * FP32 + (cast if batch.tokens > chunk else 0)
    return cells * copies + chunk * shape.hidden * batch.element + _gathered_hidden(shape, batch)


def _head_backward(shape: ModelShape, batch: MicroBatch) -> int:
    """Its backward: logits of a chunk and what is left of the one before, or the weight's gradient of a chunk."""
    chunk, cells = _chunk_cells(shape, batch)
    e, several = batch.element, batch.tokens > chunk
    cast = e if e != FP32 else 0
    loop = (FP32 + cast) * (2 if several else 1)
    if batch.entropy:
        loop = max(loop, 2 * FP32 + ((cast or FP32) if several else 0))
    weight = shape.padded_vocab(batch.tp) // batch.tp * shape.hidden
    product = cells * (FP32 + cast) + (weight * e if cast else 0)
    accumulator = 0 if batch.fp32_gradients else weight * FP32
    gradient = batch.padded * shape.hidden * e
    working = max(product, cells * loop) + chunk * shape.hidden * e
    return working + accumulator + gradient + _gathered_hidden(shape, batch)


def _chunk_cells(shape: ModelShape, batch: MicroBatch) -> tuple[int, int]:
    chunk = min(batch.chunk, batch.tokens)
    return chunk, chunk * shape.padded_vocab(batch.tp) // batch.tp


def _gathered_hidden(shape: ModelShape, batch: MicroBatch) -> int:
    return batch.padded * shape.hidden * batch.element if batch.gathers else 0
