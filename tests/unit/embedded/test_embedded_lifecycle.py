"""What only the embedded engine can be asked: incomplete updates, freed memory, threads, failures inside."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref

import pytest
import small_models
import torch
from embedded_generator import Generator, request

from colocate_grpo.errors import ConfigError
from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.embedded_batch import Batch
from colocate_grpo.rollout.engine import EngineError

PROMPT = list(range(20, 40))


@pytest.fixture
def run(models):
    made = Generator(*models("qwen3"), slots=4)
    yield made
    made.runner.run(made.engine.stop())
    made.runner.close()


def update(run, tensors, version=2):
    async def work():
        await run.engine.begin_update(version)
        await run.engine.apply_bucket(list(tensors.items()))
        await run.engine.end_update()

    run.runner.run(work())


def named(run):
    return {name: p.detach() for name, p in run.model.named_parameters()}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "missing weight model.layers.1.self_attn.k_proj"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "unknown weight model.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model.norm.weight has shape \[7\], expected \[64\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(500, 64)}), "unknown weight lm_head.weight"),
        (lambda t: t.clear(), r"\(24 in all\)"),
    ],
)
def test_an_incomplete_update_is_an_error_and_leaves_no_usable_weights(run, damage, message):
    before = run([request("a", PROMPT)])[0]
    tensors = named(run)
    damage(tensors)
    with pytest.raises(EngineError, match=message):
        update(run, tensors)
    with pytest.raises(EngineError, match="no weights were pushed"):
        run([request("a", PROMPT)])
    update(run, named(run), version=1)
    assert run([request("a", PROMPT)])[0] == before


def test_weights_are_copied_never_shared(run):
    before = run([request("a", PROMPT)])[0]
    tensors = {name: t.clone() for name, t in named(run).items()}
    update(run, tensors, version=1)
    for tensor in tensors.values():
        tensor.zero_()
    assert run([request("a", PROMPT)])[0] == before


def test_updates_out_of_order_are_errors(run):
    engine = run.engine
    for call in (engine.apply_bucket([]), engine.end_update()):
        with pytest.raises(EngineError, match="no update was begun"):
            run.runner.run(call)
    run.runner.run(engine.begin_update(5))
    with pytest.raises(EngineError, match="update 5 is not ended"):
        run.runner.run(engine.begin_update(6))
    with pytest.raises(EngineError, match="no weights were pushed"):
        run([request("a", PROMPT)])
    run.runner.run(engine.sleep())
    with pytest.raises(EngineError, match="weights are asleep"):
        run.runner.run(engine.begin_update(7))
    with pytest.raises(EngineError, match="before the weights"):
        run.runner.run(engine.wake(("kv_cache",)))


def test_sleep_frees_the_memory(run):
    run([request("a", PROMPT)])
    engine = run.engine
    kept = [engine._weights.embedding, engine._weights.layers[0].qkv, engine._batch.blocks[0].cache.keys(0)]
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in kept]
    del kept
    run.runner.run(engine.sleep(("kv_cache",)))
    gc.collect()
    assert [ref() is None for ref in gone] == [False, False, True]
    run.runner.run(engine.sleep())
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_weights_that_broke_leave_nothing_behind(run):
    """NaN in a cache would outlive the weights that made it: 0 * NaN is NaN."""
    before = run([request("a", PROMPT)])[0]
    update(run, {name: torch.full_like(t, float("nan")) for name, t in named(run).items()})
    for done in run([request(i, PROMPT, seed=i) for i in range(8)]):
        assert all(math.isnan(logprob) for logprob in done.logprobs)
    update(run, named(run), version=1)
    assert run([request("a", PROMPT)])[0] == before


def test_a_busy_engine_neither_sleeps_nor_takes_weights(run):
    async def work():
        task = asyncio.create_task(run.engine.generate(request("a", PROMPT, max_new=500, stop=())))
        await asyncio.sleep(0)
        for call in (run.engine.sleep(), run.engine.begin_update(2)):
            with pytest.raises(EngineError, match="1 requests are running"):
                await call
        await run.engine.abort()
        await run.engine.sleep()
        return await task

    assert run.runner.run(work()).finish_reason == "abort"


def test_other_coroutines_run_between_steps(run):
    """A console or a reward worker is never held up for longer than a step."""

    async def work():
        turns = 0
        task = asyncio.create_task(run.engine.generate(request("a", PROMPT, max_new=200, stop=())))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert run.runner.run(work()) >= 200


def test_threads_are_given_back(run):
    torch.set_num_threads(2)
    try:
        seen = set()
        step = Batch.step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Batch, "step", lambda batch: (seen.add(torch.get_num_threads()), step(batch))[1])
            run([request("a", PROMPT)])
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(1)


def test_a_failure_inside_reaches_every_caller_and_the_engine_goes_on(run, monkeypatch):
    def fail(batch):
        raise MemoryError("no room")

    async def work():
        calls = [run.engine.generate(request(i, PROMPT)) for i in range(6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", fail)
        errors = run.runner.run(work())
    assert [type(e) for e in errors] == [EngineError] * 6
    assert "no room" in str(errors[0])
    assert len(run([request("a", PROMPT, max_new=5, stop=())])[0].token_ids) == 5


def test_requests_that_cannot_be_served(run):
    with pytest.raises(EngineError, match="4090 \\+ 24 tokens do not fit the model's 4096 positions"):
        run([request("a", [1] * 4090)])
    with pytest.raises(EngineError, match="already running"):
        run([request("a", PROMPT), request("a", PROMPT)])


def test_a_stopped_engine(run):
    run.runner.run(run.engine.stop())
    run.runner.run(run.engine.stop())
    assert not run.runner.run(run.engine.health())
    with pytest.raises(EngineError, match="stopped"):
        run([request("a", PROMPT)])
    with pytest.raises(EngineError, match="stopped"):
        run.runner.run(run.engine.wake())


def test_an_unsupported_family_is_a_users_mistake(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="gpt2"):
        EmbeddedEngine(small_models.make_config(tmp_path), tmp_path)
