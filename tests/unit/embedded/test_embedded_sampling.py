"""Sampling: the right distribution, the right filters, the same draw for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from colocate_grpo.rollout.embedded_sampling import SamplingRows, noise, sample

VOCAB = 50


def rows(count, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0):
    k = top_k if top_k > 0 else VOCAB
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.full((count,), k),
        torch.full((count,), min_p),
        filters=top_p < 1 or top_k > 0 or min_p > 0,
        greedy=temperature == 0,
    )


def draw(logits, parameters, seed=0):
    count = len(parameters.temperature_R)
    return sample(logits.expand(count, -1), torch.from_numpy(noise(seed, count)), parameters)


def test_noise_is_uniform_repeatable_and_a_stream():
    long = noise(12345, 100_000)
    assert np.array_equal(long[:7], noise(12345, 7))
    assert not np.array_equal(noise(12346, 7), long[:7])
    assert long.min() >= 0
    assert long.max() < 1
    counts, _ = np.histogram(long, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 45  # chi-square, 19 degrees: p = 0.001 at 43.8
    assert abs(np.corrcoef(long[:-1], long[1:])[0, 1]) < 0.01
    # Written down: a sample must be the same with another version of numpy.
    assert noise(2**63 - 1, 2).tolist() == pytest.approx([0.9258067163090251, 0.18157025027346085], abs=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.randn(VOCAB) * 2
    tokens, logprobs = draw(logits, rows(200_000, temperature))
    expected = torch.log_softmax(logits / temperature, -1)
    frequency = torch.bincount(tokens, minlength=VOCAB) / len(tokens)
    standard_error = (expected.exp() * (1 - expected.exp()) / len(tokens)).sqrt()
    assert ((frequency - expected.exp()).abs() <= 5 * standard_error + 1e-9).all()
    torch.testing.assert_close(logprobs, expected[tokens], atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.one_of(
        st.builds(lambda p: (TopPLogitsWarper(p), {"top_p": p}), st.floats(0.05, 0.99)),
        st.builds(lambda k: (TopKLogitsWarper(k), {"top_k": k}), st.integers(1, VOCAB)),
        st.builds(lambda m: (MinPLogitsWarper(m), {"min_p": m}), st.floats(0.01, 0.9)),
    ),
)
def test_filters_keep_what_those_of_transformers_keep(seed, case):
    warper, parameters = case
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    allowed = warper(None, logits[None])[0] > float("-inf")
    tokens, logprobs = draw(logits, rows(4000, **parameters), seed)
    assert allowed[tokens].all()
    likely = torch.softmax(logits.masked_fill(~allowed, float("-inf")), -1) > 0.005
    assert set(likely.nonzero().flatten().tolist()) <= set(tokens.tolist())
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens], atol=2e-6, rtol=0)


def test_greedy_rows_among_sampled_ones():
    logits = torch.randn(4, VOCAB)
    parameters = rows(4)._replace(temperature_R=torch.tensor([0.0, 1.0, 0.0, 0.3]), greedy=True)
    tokens, logprobs = sample(logits, torch.full((4,), 0.999), parameters)
    assert tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits[0], -1).max())


def test_impossible_tokens_are_never_drawn():
    """The extremes of the noise, with a distribution whose first and last tokens have no probability at all."""
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 7], logits[:, 9] = 0.0, -1.0
    highest = 1 - 2.0**-52
    tokens, _ = sample(logits, torch.tensor([0.0, highest], dtype=torch.float64), rows(2))
    assert tokens.tolist() == [7, 9]


def test_a_flat_distribution_over_a_large_vocabulary_reaches_both_ends():
    size = 151_936
    parameters = SamplingRows(
        *(torch.ones(2) for _ in range(2)), torch.tensor([size] * 2), torch.zeros(2), False, False
    )
    tokens, _ = sample(torch.zeros(2, size), torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64), parameters)
    assert tokens.tolist() == [0, size - 1]
