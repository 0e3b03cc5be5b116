"""SwiGLU against the formula, in value, gradient and what it keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from colocate_grpo.train.mlp import swiglu


def test_swiglu_and_its_gradient_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 3, 14, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, 7, dtype=torch.float64)
    gate, up = gate_up.chunk(2, -1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(swiglu(gate_up), expected)
    ours, theirs = (torch.autograd.grad(out, gate_up, weight)[0] for out in (swiglu(gate_up), expected))
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(swiglu, gate_up)


def test_swiglu_keeps_its_input_alone() -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
