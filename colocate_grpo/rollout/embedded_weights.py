"""The embedded engine's own copy of the weights: fused where one product is faster than three, known by HF names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colocate_grpo.train.shape import ModelShape


class LayerWeights:
    """One decoder layer. Projections are [out, in]; `qkv` holds the rows of q, k and v, `gate_up` those of both."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        h, d = shape.hidden, shape.head_dim
        q_rows, kv_rows = shape.heads * d, shape.kv_heads * d
        self.input_norm = torch.empty(h, dtype=dtype)
        self.qkv = torch.empty(q_rows + 2 * kv_rows, h, dtype=dtype)
        self.qkv_bias = torch.empty(q_rows + 2 * kv_rows, dtype=dtype) if shape.qkv_bias else None
        self.qk_norm = torch.empty(2, d, dtype=dtype) if shape.qk_norm else None
        # One row a head, q heads then k heads, so that both are normalised at once.
        self.qk_scale = torch.empty(shape.heads + shape.kv_heads, d, dtype=dtype) if shape.qk_norm else None
        self._heads = [shape.heads, shape.kv_heads]
        self.output = torch.empty(h, q_rows, dtype=dtype)
        self.post_norm = torch.empty(h, dtype=dtype)
        self.gate_up = torch.empty(2 * shape.ffn, h, dtype=dtype)
        self.down = torch.empty(h, shape.ffn, dtype=dtype)
        self._split = [q_rows, kv_rows, kv_rows]

    def derive(self) -> None:
        """Bring what is computed from the weights up to date."""
        if self.qk_scale is not None and self.qk_norm is not None:
            for rows, norm in zip(self.qk_scale.split(self._heads), self.qk_norm, strict=True):
                rows.copy_(norm)

    def named(self) -> dict[str, Tensor]:
        """Views of the storages under the names inside a Hugging Face layer."""
        views = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.o_proj.weight": self.output,
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.down_proj.weight": self.down,
        }
        views |= zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), self.gate_up.chunk(2), strict=True)
        views |= zip([f"self_attn.{x}_proj.weight" for x in "qkv"], self.qkv.split(self._split), strict=True)
        if self.qkv_bias is not None:
            views |= zip([f"self_attn.{x}_proj.bias" for x in "qkv"], self.qkv_bias.split(self._split), strict=True)
        if self.qk_norm is not None:
            views |= zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self.qk_norm.unbind(), strict=True)
        return views


class EngineWeights:
    """All weights; empty until they are pushed."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.embedding = torch.empty(shape.vocab, shape.hidden, dtype=dtype)
        self.layers = [LayerWeights(shape, dtype) for _ in range(shape.layers)]
        self.final_norm = torch.empty(shape.hidden, dtype=dtype)
        self.head = self.embedding if shape.tied else torch.empty_like(self.embedding)
        self.named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not shape.tied:
            self.named["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            self.named |= {f"model.layers.{i}.{name}": view for name, view in layer.named().items()}


class WeightUpdate:
    """One transaction: what came, what was wrong with it, and what is missing at its end."""

    def __init__(self, weights: EngineWeights, version: int) -> None:
        self.weights, self.version = weights, version
        self._missing = set(weights.named)
        self._problems: list[str] = []

    def apply(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy the tensors of a bucket into the engine's storages."""
        for name, tensor in bucket:
            target = self.weights.named.get(name)
            if target is None:
                self._problems.append(f"unknown weight {name}")
            elif target.shape != tensor.shape:
                self._problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            else:
                target.copy_(tensor.detach())
            self._missing.discard(name)

    def finish(self) -> list[str]:
        """End the transaction; returns what makes it unusable, nothing when the weights are complete."""
        for layer in self.weights.layers:
            layer.derive()
        return [*self._problems, *(f"missing weight {name}" for name in sorted(self._missing))]
