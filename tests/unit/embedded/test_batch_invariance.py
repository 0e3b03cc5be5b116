"""A request's tokens and log-probs are the same bits whatever else is in the batch, and however it was interrupted."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
import torch
from embedded_generator import request
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_grpo.rollout.embedded_block import Block
from colocate_grpo.rollout.embedded_cache import CHUNK
from colocate_grpo.rollout.embedded_model import attend

VOCAB = 500


def catalogue(count=40, seed=1):
    """Requests of every kind: lengths, shared prompts, temperatures, filters, limits."""
    rng = random.Random(seed)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 30, 33, 64, 90)))] for _ in range(12)]
    filters = ({}, {}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 40})
    return [
        request(
            i,
            rng.choice(shared),
            seed=rng.getrandbits(63),
            max_new=rng.choice((1, 4, 20, 45)),
            temperature=rng.choice((1.0, 1.0, 0.6, 0.0)),
            stop=tuple(rng.sample(range(VOCAB), rng.choice((0, 1, 12)))),
            **rng.choice(filters),
        )
        for i in range(count)
    ]


REQUESTS = catalogue()


@pytest.fixture(scope="module")
def alone(generator):
    """Every request generated on its own."""
    run = generator(slots=16)
    return {r.request_id: run([r])[0] for r in REQUESTS}


@settings(deadline=None, max_examples=12)
@given(st.permutations(range(len(REQUESTS))), st.integers(1, len(REQUESTS)))
def test_any_batch_gives_the_bits_of_a_request_alone(generator, alone, order, size):
    chosen = [REQUESTS[i] for i in order[:size]]
    for done in generator(slots=16)(chosen):
        assert done == alone[done.request_id]


@settings(deadline=None, max_examples=12)
@given(st.randoms(use_true_random=False))
def test_arrival_aborts_continuations_and_lost_callers_change_nothing(generator, alone, rng):
    """Requests come one by one while others run; all is aborted now and then and goes on where it was."""
    run = generator(slots=16)

    async def patient(r, delay):
        for _ in range(delay):
            await asyncio.sleep(0)
        tokens, logprobs, left = (), (), r.sampling.max_new_tokens
        while True:
            rest = dataclasses.replace(
                r,
                token_ids=r.token_ids + tokens,
                sampled=len(tokens),
                sampling=dataclasses.replace(r.sampling, max_new_tokens=left),
            )
            done = await run.engine.generate(rest)
            tokens, logprobs = tokens + done.token_ids, logprobs + done.logprobs
            left -= len(done.token_ids)
            if done.finish_reason != "abort":
                return r.request_id, tokens, logprobs, done.finish_reason

    async def disturb(tasks):
        for _ in range(4):
            for _ in range(rng.randint(1, 30)):
                await asyncio.sleep(0)
            await run.engine.abort()
        return [task.cancel() for task in rng.sample(tasks, 2)]

    async def everything():
        chosen = rng.sample(REQUESTS, rng.randint(4, 30))
        tasks = [asyncio.create_task(patient(r, rng.randint(0, 60))) for r in chosen]
        await disturb(tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = [r for r in run.runner.run(everything()) if not isinstance(r, asyncio.CancelledError)]
    assert ended
    for name, tokens, logprobs, reason in ended:
        expected = alone[name]
        assert (tokens, logprobs, reason) == (expected.token_ids, expected.logprobs, expected.finish_reason)


def test_rows_that_move_keep_their_bits(generator, monkeypatch):
    """Three blocks on two threads; long answers come to the front of their block, the last ones move to another."""
    moved, ordered = [], []
    move, copy = Block.move_from, Block._copy_state
    monkeypatch.setattr(Block, "move_from", lambda to, *rows: (moved.append(rows[1]), move(to, *rows)))
    monkeypatch.setattr(Block, "_copy_state", lambda to, *rows: (ordered.append(to is rows[0]), copy(to, *rows)))
    run = generator(slots=150)
    rng = random.Random(5)
    requests = [
        request(i, [rng.randrange(VOCAB) for _ in range(20)], seed=i, max_new=80 if i % 5 == 0 else 5, stop=())
        for i in range(300)
    ]
    together = run(requests)
    assert sum(len(rows) for rows in moved) >= 10
    assert sum(ordered) >= 2
    for i in range(0, 300, 10):
        assert run([requests[i]])[0] == together[i]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_does_not_see_how_long_the_others_are(dtype):
    """The same rows under wider and wider masks: bit-equal, and right."""
    torch.manual_seed(0)
    kv_heads, rows, group, dim = 2, 8, 3, 32
    q = torch.randn(rows, kv_heads, group, dim, dtype=dtype)
    keys, values = (torch.randn(8, rows, kv_heads, CHUNK, dim, dtype=dtype) for _ in range(2))
    lengths = torch.tensor([128, 120, 100, 65, 64, 17, 2, 1])
    results = []
    for chunks in (2, 3, 5, 8):
        visible = torch.arange(chunks * CHUNK) < lengths[:, None, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        results.append(attend(q, keys, values, mask, [rows] * chunks))
        results.append(attend(q, keys, values, mask, [rows, 4, *[0] * (chunks - 2)]))
        few = attend(q, keys, values, mask, [5, 4, *[0] * (chunks - 2)])
        assert torch.equal(few[:5], results[0][:5])
        assert not few[5:].any()
    assert all(torch.equal(results[0], other) for other in results[1:])
    k, v = (t.float().permute(1, 2, 0, 3, 4).flatten(2, 3) for t in (keys, values))
    visible = (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, attn_mask=visible)
    torch.testing.assert_close(results[0].float(), expected, atol=2e-5 if dtype is torch.float32 else 5e-2, rtol=0)
