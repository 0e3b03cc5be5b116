"""Causal attention over packed segments: varlen kernels on CUDA, grouped SDPA on CPU. One spec for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

# A padded group may do this many times the work of its segments; one more kernel call costs about that much on CPU.
PADDING_WASTE = 1.25
CALL_COST = 64 * 64


@dataclass
class Group:
    """Segments that share one SDPA call on CPU, padded to `width` at their ends.

    `gather` [n * width] are the packed rows of the padded ones (row 0 where padded); `valid` [t] are the padded
    rows that hold the packed rows `rows` [t].
    """

    count: int
    width: int
    gather: Tensor
    valid: Tensor
    rows: Tensor


@dataclass
class Segments:
    """Boundaries of a packed micro-batch: lengths, rotary positions, and what each device's kernel needs."""

    lengths: list[int]
    cu_seqlens: Tensor
    positions: Tensor
    groups: list[Group] = field(default_factory=list)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        sizes = torch.tensor(list(lengths), dtype=torch.int32)
        cu_seqlens = F.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
        total = int(cu_seqlens[-1])
        starts = torch.repeat_interleave(cu_seqlens[:-1], sizes)
        positions = torch.arange(total) - starts
        groups = _group(list(lengths), cu_seqlens.tolist()) if device.type == "cpu" else []
        return cls(list(lengths), cu_seqlens.to(device), positions.to(device), groups)


def _group(lengths: list[int], starts: list[int]) -> list[Group]:
    """Group segments of similar length: padding at the end is exact under a causal mask."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    useful = 0
    for i in order:
        width = lengths[groups[-1][0]] if groups else 0
        padded = width * width * (len(groups[-1]) + 1) if groups else 0
        useful += lengths[i] ** 2 + CALL_COST
        if groups and padded <= PADDING_WASTE * useful:
            groups[-1].append(i)
        else:
            groups.append([i])
            useful = lengths[i] ** 2 + CALL_COST
    return [_make_group(members, lengths, starts) for members in groups]


def _make_group(members: list[int], lengths: list[int], starts: list[int]) -> Group:
    width = lengths[members[0]]
    offsets = torch.arange(width)
    sizes = torch.tensor([lengths[i] for i in members])
    begins = torch.tensor([starts[i] for i in members])
    inside = offsets[None, :] < sizes[:, None]
    gather = torch.where(inside, begins[:, None] + offsets, 0).flatten()
    valid = inside.flatten().nonzero().flatten()
    return Group(len(members), width, gather, valid, gather[valid])


class _Take(torch.autograd.Function):
    """`x[index]` whose gradient is `grad[valid]` put back at `rows`: no scatter-add, padded rows get nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        return x.index_select(0, group.gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        group: Group = ctx.group
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return out.index_copy_(0, group.rows, grad.index_select(0, group.valid)), None


class _Put(torch.autograd.Function):
    """Outputs of all groups, padded rows cut off, back in packed order."""

    @staticmethod
    def forward(ctx: Any, total: int, groups: list[Group], *outputs: Tensor) -> Tensor:
        ctx.groups, ctx.sizes = groups, [o.shape[0] for o in outputs]
        packed = outputs[0].new_empty(total, *outputs[0].shape[1:])
        for group, output in zip(groups, outputs, strict=True):
            packed.index_copy_(0, group.rows, output.index_select(0, group.valid))
        return packed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = []
        for group, size in zip(ctx.groups, ctx.sizes, strict=True):
            padded = grad.new_zeros(size, *grad.shape[1:])
            grads.append(padded.index_copy_(0, group.valid, grad.index_select(0, group.rows)))
        return None, None, *grads


def packed_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Causal attention inside each segment.

    q [t, heads, d], k and v [t, kv_heads, d] -> [t, heads, d]; t is the sum of the segments' lengths.
    """
    grouped_query = q.shape[1] != k.shape[1]
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = segments.cu_seqlens, segments.longest
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=grouped_query)
        assert isinstance(out, Tensor)
        return out
    if len(segments.lengths) == 1:
        return _sdpa(q[None], k[None], v[None], scale)[0]
    outputs = []
    for group in segments.groups:
        padded_q, padded_k, padded_v = (
            _Take.apply(x, group).view(group.count, group.width, *x.shape[1:]) for x in (q, k, v)
        )
        outputs.append(_sdpa(padded_q, padded_k, padded_v, scale).flatten(0, 1))
    return _Put.apply(q.shape[0], segments.groups, *outputs)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[n, t, heads, d] in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [t, heads, d] by cos and sin [t, 1, d] (halves convention of Hugging Face).

    The second halves of cos and sin repeat the first ones, and are not read.
    """
    half = x.shape[-1] // 2
    return _Rotate.apply(x, cos[..., :half], sin[..., :half])


class _Rotate(torch.autograd.Function):
    """(l, r) -> (l cos - r sin, r cos + l sin); backward turns the other way. No negated nor joined copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (left, right), (out_left, out_right) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-direction)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin, value=direction)
    return out


class PackedCoreAttention(MegatronModule):
    """Megatron's `core_attention` slot. Holds no parameters."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1
        assert config.attention_dropout == 0.0
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention(q, k, v, segments, self.scale)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with a forward for packed micro-batches only.

    `rotary_pos_emb` is [2, t, 1, d] (cos and sin of every token's own position), `packed_seq_params` are Segments:
    no host synchronisation, and one table for all layers.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, packed_seq_params: Segments, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [t(/tp), 1, h] -> ([t(/tp), 1, h], bias)."""
        q, k, v = self.get_query_key_value_tensors(hidden_states)
        cos, sin = rotary_pos_emb
        q, k, v = q.squeeze(1), k.squeeze(1), v.squeeze(1)
        out = self.core_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, packed_seq_params)
        return self.linear_proj(out.reshape(out.shape[0], 1, -1))
