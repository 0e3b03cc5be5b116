"""Megatron's MLP with SwiGLU as one operation, which keeps the first product's output for its backward and no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class GatedMLP(MLP):
    """Column-parallel, SwiGLU, row-parallel; no biases."""

    def forward(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor | None]:
        """hidden_states [t(/tp), 1, h] -> ([t(/tp), 1, h], None)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_up))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 f], gate in the first half -> [..., f] (Shazeer 2020, arXiv:2002.05202)."""
    return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, F.silu(gate), out=grad_up)
        return out
