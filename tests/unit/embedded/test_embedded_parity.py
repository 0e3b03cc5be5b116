"""The embedded engine against transformers: the same model, the same numbers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from embedded_generator import request

VOCAB = 500
FAMILIES = ("qwen3", "qwen2", "llama")


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def reference_logprobs(model, prompt, response, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].float() / (temperature or 1.0)
    log_p = F.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return log_p.gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(generator, family):
    """Prompts around the borders of prefill (32) and cache chunks (64), answers that cross them, 3 temperatures."""
    run = generator(family)
    lengths = (1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 100, 129, 300)
    requests = [
        request(f"{i}/{t}", prompt, seed=i, max_new=80, temperature=t, stop=())
        for i, prompt in enumerate(prompts(lengths))
        for t in (0.7, 1.0, 1.3)
    ]
    for r, done in zip(requests, run(requests), strict=True):
        assert (len(done.token_ids), done.finish_reason) == (80, "length")
        expected = reference_logprobs(run.model, r.token_ids, done.token_ids, r.sampling.temperature)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(generator, family):
    run = generator(family)
    for prompt in prompts((5, 40, 90)):
        (done,) = run([request("g", prompt, max_new=70, temperature=0.0, stop=())])
        with torch.no_grad():
            expected = run.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=70,
                min_new_tokens=70,
                do_sample=False,
                pad_token_id=0,
            )
        assert list(done.token_ids) == expected[0, len(prompt) :].tolist()


def test_bfloat16_is_near_float32(generator):
    low, high = generator(dtype="bfloat16"), generator()
    requests = [request(i, p, seed=i, max_new=40, stop=()) for i, p in enumerate(prompts((20, 70)))]
    for r, done in zip(requests, low(requests), strict=True):
        expected = reference_logprobs(high.model, r.token_ids, done.token_ids, 1.0)
        assert (torch.tensor(done.logprobs) - expected).abs().mean() < 0.1


def test_an_answer_ends_with_any_of_its_stop_tokens(generator):
    run = generator()
    stops = tuple(range(0, VOCAB, 25))
    requests = [request(i, p, seed=i, max_new=60, stop=stops) for i, p in enumerate(prompts([9] * 40))]
    reasons = set()
    for done in run(requests):
        reasons.add(done.finish_reason)
        body, last = done.token_ids[:-1], done.token_ids[-1]
        assert not set(body) & set(stops)
        assert (last in stops) == (done.finish_reason == "stop")
        assert done.finish_reason == "stop" or len(done.token_ids) == 60
    assert reasons == {"stop", "length"}


def test_a_push_changes_what_is_sampled(generator, models):
    run = generator(slots=2)
    ask = [request("a", prompts([12])[0], max_new=30, stop=())]
    before = run(ask)[0]
    other = {n: p.detach() * 0.5 for n, p in run.model.named_parameters()}
    old = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.model.load_state_dict(other, strict=False)
    try:
        run.push(run.model, version=2)
        after = run(ask)[0]
        expected = reference_logprobs(run.model, ask[0].token_ids, after.token_ids, 1.0)
    finally:
        run.model.load_state_dict(old, strict=False)
        run.push(run.model, version=3)
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-4, rtol=0)
    assert (before.weight_version, after.weight_version) == (1, 2)
    assert before.token_ids != after.token_ids
    assert run(ask)[0].logprobs == before.logprobs
