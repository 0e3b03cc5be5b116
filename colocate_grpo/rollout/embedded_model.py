"""Forward pass of a decoder-only transformer with a KV cache, in arithmetic that does not depend on the neighbours.

A CPU matrix product may round differently for another number of rows, but not for another place among them. So every
product here has a fixed number of rows, and attention runs over fixed chunks of positions: a chunk that lies wholly
behind the end of a sequence is left out or adds exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from colocate_grpo.rollout.embedded_cache import CHUNK, KvCache
from colocate_grpo.rollout.embedded_weights import EngineWeights, LayerWeights
from colocate_grpo.train.shape import ModelShape

Rows = Tensor | slice
ALL_ROWS = slice(None)


class Decoder:
    """Runs tokens [rows, width] through the layers; the caller keeps the shapes fixed."""

    def __init__(self, shape: ModelShape, hf_config: PretrainedConfig, weights: EngineWeights) -> None:
        self.shape, self.weights = shape, weights
        rotary = LlamaRotaryEmbedding(hf_config)  # type: ignore[arg-type]  # reads fields that every family has
        self._frequencies, self._rotary_scale = rotary.inv_freq.float(), rotary.attention_scaling
        self._rotary_tables = (torch.empty(0, shape.head_dim),) * 2

    def hidden(self, ids_BQ: Tensor, positions_BQ: Tensor, cache: KvCache, reach: Sequence[Rows]) -> Tensor:
        """Last layer's output [B * Q, hidden]. Fills `cache`; `reach[i]` are the rows with tokens in chunk i."""
        width = len(reach) * CHUNK
        flat = positions_BQ.flatten()
        cos, sin = (table[flat].unsqueeze(1) for table in self._rotary(width))
        rows = torch.arange(ids_BQ.shape[0]).unsqueeze(1) * cache.positions
        index = (rows + positions_BQ).flatten()
        mask = torch.where(torch.arange(width) <= positions_BQ.unsqueeze(-1), 0.0, float("-inf"))
        x = F.embedding(ids_BQ.flatten(), self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            x = x + self._attention(i, layer, self._norm(x, layer.input_norm), cos, sin, index, mask, cache, reach)
            gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Float logits [R, vocab]."""
        return F.linear(self._norm(hidden_RH, self.weights.final_norm), self.weights.head).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Tensor,
        mask_BQT: Tensor,
        cache: KvCache,
        reach: Sequence[Rows],
    ) -> Tensor:
        s, (rows, width, _) = self.shape, mask_BQT.shape
        heads = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, s.head_dim))
        qk, v = heads.split([s.heads + s.kv_heads, s.kv_heads], dim=1)
        if layer.qk_scale is not None:
            qk = self._norm(qk, layer.qk_scale)
        qk = qk * cos + qk.roll(s.head_dim // 2, -1) * sin
        q, k = qk.split([s.heads, s.kv_heads], dim=1)
        cache.write(index, places, k.transpose(0, 1), v.transpose(0, 1))
        # [B, Q, K, G, D] -> [K, B, G * Q, D]: the queries that share a key head are one matrix.
        grouped = q.view(rows, width, s.kv_heads, -1, s.head_dim).permute(2, 0, 3, 1, 4)
        attended = attend(grouped * s.head_dim**-0.5, cache.keys[index], cache.values[index], mask_BQT, reach)
        return F.linear(attended.permute(1, 3, 0, 2, 4).reshape(x.shape[0], -1), layer.output)

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


def attend(q_KBGQD: Tensor, keys_KBTD: Tensor, values_KBTD: Tensor, mask_BQT: Tensor, reach: Sequence[Rows]) -> Tensor:
    """Softmax attention [K, B, G, Q, D] over the first T positions, chunk by chunk, for the rows that reach a chunk.

    A row's result does not depend on T nor on the other rows: every (row, key head) is a matrix product of its own, of
    one shape; a chunk that a row does not reach has weights that are exactly 0, whether it is computed or not. Rows
    that do not reach the first chunk are nobody's, and get 0.
    """
    used = reach[0]
    if isinstance(used, Tensor):
        out = torch.zeros_like(q_KBGQD)
        q, keys, values = (t.index_select(1, used) for t in (q_KBGQD, keys_KBTD, values_KBTD))
        out[:, used] = attend(q, keys, values, mask_BQT[used], [ALL_ROWS] * len(reach))
        return out
    kv_heads, rows, group, width, dim = q_KBGQD.shape
    q = q_KBGQD.reshape(kv_heads, rows, group * width, dim)
    chunks = [slice(i * CHUNK, (i + 1) * CHUNK) for i in range(len(reach))]
    scores = _products(q, keys_KBTD[:, :, :CHUNK].transpose(2, 3))
    later = list(zip(chunks, reach, strict=True))[1:]
    if later:
        scores = F.pad(scores, (0, len(later) * CHUNK), value=float("-inf"))
    for chunk, some in later:
        scores[..., chunk][:, some] = _products(q[:, some], keys_KBTD[:, :, chunk][:, some].transpose(2, 3))
    masked = scores.view(kv_heads, rows, group, width, -1).add_(mask_BQT.unsqueeze(1))
    weights = torch.softmax(masked, -1, dtype=torch.float32).to(q.dtype).view(scores.shape)
    out = _products(weights[..., :CHUNK], values_KBTD[:, :, :CHUNK])
    for chunk, some in later:
        out[:, some] += _products(weights[..., chunk][:, some], values_KBTD[:, :, chunk][:, some])
    return out.view(q_KBGQD.shape)


def _products(a_KBMX: Tensor, b_KBXN: Tensor) -> Tensor:
    """a @ b of every (key head, row)."""
    return torch.bmm(a_KBMX.flatten(0, 1), b_KBXN.flatten(0, 1)).unflatten(0, a_KBMX.shape[:2])
