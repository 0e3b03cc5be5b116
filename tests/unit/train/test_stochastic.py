"""Stochastic rounding and the counter-based random numbers behind it."""

from __future__ import annotations

import torch

from colocate_grpo.train.stochastic import mix, round_stochastic

CPU = torch.device("cpu")


def rounded(value: torch.Tensor, key: int = 1) -> torch.Tensor:
    return round_stochastic(value, mix(key, 0, value.numel(), CPU) & 0xFFFF).float()


def test_rounds_to_a_neighbour_and_keeps_the_mean() -> None:
    value = torch.full((200_000,), 1.0 + 2**-7 * 0.3)
    found = rounded(value)
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs((found > 1.0).double().mean().item() - 0.3) < 0.005
    assert set(rounded(-value).unique().tolist()) == {-1.0, -1.0 - 2**-7}


def test_what_bf16_can_hold_stays() -> None:
    exact = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(round_stochastic(exact.float(), torch.full((1000,), 65535)), exact)


def test_bits_depend_on_the_counter_not_on_where_a_chunk_begins() -> None:
    whole = mix(12345, 0, 1000, CPU)
    assert torch.equal(whole[300:700], mix(12345, 300, 400, CPU))
    assert whole.unique().numel() == 1000
    assert not torch.equal(whole, mix(12346, 0, 1000, CPU))


def test_bits_are_fair_and_their_sixteen_bit_fields_independent() -> None:
    bits = mix(7, 0, 100_000, CPU)
    fields = [((bits >> shift) & 0xFFFF).double() / 65536 for shift in (0, 16, 32)]
    for field in fields:
        assert abs(field.mean().item() - 0.5) < 0.005
        assert abs(field.var().item() - 1 / 12) < 0.002
    correlation = torch.corrcoef(torch.stack(fields))
    assert (correlation - torch.eye(3, dtype=torch.float64)).abs().max() < 0.015


def test_mean_of_tiny_updates_survives() -> None:
    """Updates of 1e-6 on weights of about 0.02: rounding to the nearest leaves nearly all of them where they were."""
    weights = (torch.randn(100_000) * 0.02).to(torch.bfloat16)
    stuck, walking = weights.clone(), weights.clone()
    for step in range(20):
        stuck = (stuck.float() + 1e-6).to(torch.bfloat16)
        moved = walking.float() + 1e-6
        walking = round_stochastic(moved, mix(step, 0, moved.numel(), CPU) & 0xFFFF)
    assert (stuck == weights).double().mean() > 0.9
    mean = (walking.double() - weights.double()).mean().item()
    assert abs(mean - 20e-6) < 0.05 * 20e-6


def test_second_moment_decays() -> None:
    """0.999 in bf16: rounded to the nearest it never moves, stochastically it follows 0.999^n."""
    stuck = torch.full((50_000,), 1e-4).to(torch.bfloat16)
    decaying = stuck.clone()
    for step in range(300):
        stuck = (stuck.float() * 0.999).to(torch.bfloat16)
        decaying = round_stochastic(decaying.float() * 0.999, mix(step, 0, 50_000, CPU) & 0xFFFF)
    assert (stuck.float() == torch.tensor(1e-4).to(torch.bfloat16).float()).all()
    assert abs(decaying.double().mean().item() / 1e-4 - 0.999**300) < 0.01
