"""Packed attention: exactly attention of every segment alone, whatever it is packed with; boundaries do not leak."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_grpo.train.attention import Segments, packed_attention, rotate

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax attention written out, each segment alone."""
    out = []
    for x, y, z in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        y, z = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (y, z))
        scores = torch.einsum("qhd,khd->hqk", x, y) * DIM**-0.5
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), z))
    return torch.cat(out)


def random_qkv(total: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, HEADS, DIM), (total, KV_HEADS, DIM), (total, KV_HEADS, DIM)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=12), st.integers(0, 3))
def test_values_and_gradients_are_those_of_each_segment_alone(lengths: list[int], seed: int) -> None:
    direction = torch.randn(sum(lengths), HEADS, DIM)
    results = []
    for attend in (
        lambda q, k, v: packed_attention(q, k, v, Segments.of(lengths, CPU), DIM**-0.5),
        lambda q, k, v: one_by_one(q, k, v, lengths),
    ):
        qkv = random_qkv(sum(lengths), seed)
        out = attend(*qkv)
        (out * direction).sum().backward()
        results.append([out.detach(), *(t.grad for t in qkv)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_nothing_crosses_a_boundary() -> None:
    """Changing one segment changes no other one by a single bit."""
    lengths = [7, 30, 5, 30, 64]
    q, k, v = random_qkv(sum(lengths))
    segments = Segments.of(lengths, CPU)
    before = packed_attention(q, k, v, segments, 0.3).split(lengths)
    with torch.no_grad():
        for x in (q, k, v):
            x[7:37] += 1.0
    after = packed_attention(q, k, v, segments, 0.3).split(lengths)
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [True, False, True, True, True]


def test_positions_start_anew_in_every_segment() -> None:
    assert Segments.of([3, 1, 2], CPU).positions.tolist() == [0, 1, 2, 0, 0, 1]


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=60))
def test_groups_hold_every_row_once_and_waste_little(lengths: list[int]) -> None:
    segments = Segments.of(lengths, CPU)
    rows = torch.cat([group.rows for group in segments.groups])
    assert rows.sort().values.tolist() == list(range(sum(lengths)))
    padded = sum(group.count * group.width**2 for group in segments.groups)
    assert padded <= 1.25 * sum(length**2 + 64**2 for length in lengths)


@pytest.mark.parametrize("dim", [8, 16])
def test_rotation_is_that_of_transformers(dim: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(5, 3, dim)
    angles = torch.outer(torch.arange(5.0), torch.rand(dim // 2))
    cos, sin = (torch.cat((f, f), -1) for f in (angles.cos(), angles.sin()))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    torch.testing.assert_close(rotate(x, cos[:, None], sin[:, None]), expected[0].transpose(0, 1))


def test_padding_segment_changes_nothing() -> None:
    q, k, v = random_qkv(12)
    with_padding = packed_attention(q, k, v, Segments.of([9, 3], CPU), 0.3)[:9]
    alone = packed_attention(q[:9], k[:9], v[:9], Segments.of([9], CPU), 0.3)
    torch.testing.assert_close(with_padding, alone)
    expected = F.scaled_dot_product_attention(
        q[:9].transpose(0, 1)[None], k[:9].transpose(0, 1)[None], v[:9].transpose(0, 1)[None],
        is_causal=True, scale=0.3, enable_gqa=True,
    )  # fmt: skip
    torch.testing.assert_close(alone, expected[0].transpose(0, 1))
