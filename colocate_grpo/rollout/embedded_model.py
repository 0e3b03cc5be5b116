"""Forward pass of a decoder-only transformer with a KV cache, in arithmetic that does not depend on the neighbours.

A CPU matrix product may round differently for another number of rows, but not for another place among them. So every
product here has as many rows as a tile, and attention runs over fixed chunks of positions: a chunk that lies wholly
behind the end of a sequence is left out or adds exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from colocate_grpo.rollout.embedded_cache import CHUNK, KvCache
from colocate_grpo.rollout.embedded_weights import EngineWeights, LayerWeights
from colocate_grpo.train.shape import ModelShape


class Where(NamedTuple):
    """Positions of a step's tokens, as each layer needs them."""

    cos: Tensor
    sin: Tensor
    mask_BQT: Tensor
    places: Tensor
    reach: Sequence[int]


class Decoder:
    """Runs tokens [rows, width] through the layers; rows * width is a multiple of `tile`, and the width is fixed."""

    def __init__(self, shape: ModelShape, hf_config: PretrainedConfig, weights: EngineWeights, tile: int) -> None:
        self.shape, self.weights, self.tile = shape, weights, tile
        rotary = LlamaRotaryEmbedding(hf_config)  # type: ignore[arg-type]  # reads fields that every family has
        self._frequencies, self._rotary_scale = rotary.inv_freq.float(), rotary.attention_scaling
        self._rotary_tables = (torch.empty(0, shape.head_dim),) * 2

    def hidden(self, ids_BQ: Tensor, positions_BQ: Tensor, cache: KvCache, reach: Sequence[int]) -> Tensor:
        """Last layer's output [B * Q, hidden]. Fills `cache`; the first `reach[i]` rows have all tokens of chunk i."""
        width, flat = len(reach) * CHUNK, positions_BQ.flatten()
        cos, sin = (table[flat].unsqueeze(1) for table in self._rotary(width))
        mask = torch.where(torch.arange(width) <= positions_BQ.unsqueeze(-1), 0.0, float("-inf"))
        where = Where(cos, sin, mask, cache.places(positions_BQ), reach)
        x = F.embedding(ids_BQ.flatten(), self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            x = x + self._attention(i, layer, self._norm(x, layer.input_norm), cache, where)
            gate, up = self._linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + self._linear(F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Float logits [R, vocab]."""
        return self._linear(self._norm(hidden_RH, self.weights.final_norm), self.weights.head).float()

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, cache: KvCache, where: Where) -> Tensor:
        s, (rows, width, _) = self.shape, where.mask_BQT.shape
        heads = self._linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, s.head_dim))
        qk = heads[:, : s.heads + s.kv_heads]
        turned = self._norm(qk, layer.qk_scale) if layer.qk_scale is not None else qk
        torch.add(turned * where.cos, turned.roll(s.head_dim // 2, -1).mul_(where.sin), out=qk)
        cache.write(index, where.places, heads[:, s.heads :])
        # [B, Q, K, G, D] -> [B, K, G * Q, D]: the queries that share a key head are one matrix.
        grouped = heads[:, : s.heads].view(rows, width, s.kv_heads, -1, s.head_dim).transpose(1, 2).transpose(2, 3)
        queries = grouped.reshape(rows, s.kv_heads, -1, s.head_dim)
        attended = attend(queries, cache.keys(index), cache.values(index), where.mask_BQT, where.reach)
        return self._linear(attended.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(len(x), -1), layer.output)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `F.linear`, in products of `tile` rows."""
        out = x.new_empty(len(x), len(weight))
        for part, target in zip(x.split(self.tile), out.split(self.tile), strict=True):
            if bias is None:
                torch.mm(part, weight.T, out=target)
            else:
                torch.addmm(bias, part, weight.T, out=target)
        return out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.shape.norm_eps).mul_(weight)

    def _rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables of cos and of sin with the sign of the rotation, in the model's type as transformers has them."""
        tables = self._rotary_tables
        if positions > tables[0].shape[0]:
            angles = torch.outer(torch.arange(positions).float(), self._frequencies)
            cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
            dtype = self.weights.embedding.dtype
            tables = torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
            self._rotary_tables = tables  # both at once: other threads read them
        return tables


def attend(q_BKMD: Tensor, keys_CBKTD: Tensor, values_CBKTD: Tensor, mask_BQT: Tensor, reach: Sequence[int]) -> Tensor:
    """Softmax attention [B, K, M, D], chunk by chunk; the first `reach[i]` rows have all that reach chunk i.

    M is G * Q, queries of a group and positions. A row's result does not depend on the number of chunks nor on the
    other rows: every (row, key head) is a matrix product of its own, of one shape; a chunk that a row does not reach
    has weights that are exactly 0, whether it is computed or not. Rows beyond `reach[0]` are nobody's, and get 0.
    """
    kv_heads, queries, dim = q_BKMD.shape[1:]
    used, (_, width, positions) = reach[0], mask_BQT.shape
    q_XMD, mask_BKGQT = q_BKMD.flatten(0, 1), mask_BQT[:, None, None].to(q_BKMD.dtype)
    scores_BKGQT = q_BKMD.new_full((used, kv_heads, queries // width, width, positions), float("-inf"))
    for i, some in enumerate(reach):
        chunk, here = slice(i * CHUNK, (i + 1) * CHUNK), some * kv_heads
        products = torch.bmm(q_XMD[:here], keys_CBKTD[i].flatten(0, 1)[:here].mT)
        part = scores_BKGQT[:some, ..., chunk]
        torch.add(mask_BKGQT[:some, ..., chunk], products.view(part.shape), alpha=dim**-0.5, out=part)
    weights = torch.softmax(scores_BKGQT, -1, dtype=torch.float32).to(q_BKMD.dtype)
    weights_XMT = weights.view(-1, queries, positions)
    out_XMD = q_XMD.new_zeros(q_XMD.shape)
    for i, some in enumerate(reach):
        chunk, here = slice(i * CHUNK, (i + 1) * CHUNK), some * kv_heads
        out_XMD[:here].baddbmm_(weights_XMT[:here, :, chunk], values_CBKTD[i].flatten(0, 1)[:here])
    return out_XMD.view(q_BKMD.shape)
