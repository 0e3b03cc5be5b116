"""What every rollout engine promises, tested on each in the same way, against transformers.

An engine comes as a fixture `<name>_engine` that gives a `Subject`: started, and asleep.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.engine import Completion, EngineError, EngineState, Request, RolloutEngine, Sampling
from colocate_grpo.weights.hf import tensor_checksum
from colocate_grpo.weights.push import push

BUCKET_MIB = 1


@dataclass
class Subject:
    """An engine under test, its event loop, and the model that was pushed last."""

    engine: RolloutEngine
    model_dir: Path
    logprob_tolerance: float
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    version: int = 0
    model: PreTrainedModel | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def push(self) -> PreTrainedModel:
        """New random weights under the next version, in the order of the loop."""
        self.version += 1
        torch.manual_seed(self.version)
        config = AutoConfig.from_pretrained(self.model_dir, initializer_range=0.3)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.run(self._push(Weights(self.model)))
        return self.model

    async def _push(self, weights: Weights) -> None:
        await self.engine.sleep()
        await self.engine.wake(("weights",))
        await push(weights, [self.engine], self.version, BUCKET_MIB)
        await self.engine.wake(("kv_cache",))

    def generate(self, *requests: Request) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(r) for r in requests))

        return self.run(together())


class Weights:
    """The trainer's side of a push: named tensors in buckets of one tensor each."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = {name: p.detach() for name, p in model.named_parameters()}

    def hf_buckets(self, max_bytes: int):
        return ([item] for item in self.tensors.items())

    def checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(t) for name, t in self.tensors.items()}


@pytest.fixture(scope="module")
def embedded_engine(tmp_path_factory):
    directory = small_models.write("qwen3", tmp_path_factory.mktemp("model"))
    engine = EmbeddedEngine(small_models.make_config(directory, rollout={"slots": 8}), directory)
    subject = Subject(engine, directory, logprob_tolerance=1e-4)
    subject.run(engine.start())
    subject.run(engine.sleep())
    yield subject
    subject.run(engine.stop())
    subject.runner.close()


@pytest.fixture(scope="module", params=["embedded"])
def subject(request) -> Subject:
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture
def awake(subject) -> Subject:
    """Awake, with weights that were pushed."""
    if subject.version == 0 or subject.engine.state is not EngineState.AWAKE:
        subject.push()
    return subject


def ask(name: object, seed: int = 0, length: int = 12, max_new: int = 20, temperature: float = 1.0, **sampling: Any):
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(small_models.VOCAB) for _ in range(length))
    return Request(str(name), prompt, seed, Sampling(temperature, max_new, sampling.pop("stop", ()), **sampling))


def reference(model: PreTrainedModel, request: Request, done: Completion) -> torch.Tensor:
    """Log-probs of the sampled tokens, from full logits."""
    ids = torch.tensor([[*request.token_ids, *done.token_ids]])
    with torch.no_grad():
        log_p = F.log_softmax(model(ids).logits[0] / (request.sampling.temperature or 1.0), -1)
    return log_p[len(request.token_ids) - 1 : -1].gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]


def test_nothing_is_generated_before_a_push(subject):
    assert subject.engine.state is EngineState.ASLEEP
    with pytest.raises(EngineError):
        subject.generate(ask("asleep"))
    subject.run(subject.engine.wake())
    with pytest.raises(EngineError):
        subject.generate(ask("no weights"))
    subject.push()
    assert len(subject.generate(ask("now"))[0].token_ids) == 20


def test_logprobs_and_versions_are_those_of_the_pushed_weights(awake):
    """Twice, so that the second push is seen to replace the first."""
    for _ in range(2):
        model = awake.push()
        requests = [ask(f"{i}/{t}", i, length=5 + 11 * i, temperature=t) for i in range(6) for t in (0.6, 1.0)]
        for request, done in zip(requests, awake.generate(*requests), strict=True):
            assert done.request_id == request.request_id
            assert done.weight_version == awake.version
            expected = reference(model, request, done)
            torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=awake.logprob_tolerance, rtol=0)


def test_checksums_are_those_of_the_pushed_weights(awake):
    expected = Weights(awake.push()).checksums()
    assert awake.run(awake.engine.checksums()) == expected


def test_greedy_takes_the_likeliest_token(awake):
    request = ask("greedy", temperature=0.0)
    (done,) = awake.generate(request)
    (narrow,) = awake.generate(ask("narrow", temperature=1.0, top_k=1))
    with torch.no_grad():
        logits = awake.model(torch.tensor([[*request.token_ids, *done.token_ids]])).logits[0]
    assert logits[len(request.token_ids) - 1 : -1].argmax(-1).tolist() == list(done.token_ids)
    assert narrow.token_ids == done.token_ids


def test_an_answer_ends_with_a_stop_token_or_at_its_limit(awake):
    free = ask("free", seed=3, max_new=16, temperature=0.0)
    (whole,) = awake.generate(free)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 16)
    stop = whole.token_ids[9]
    cut = whole.token_ids.index(stop) + 1
    (stopped,) = awake.generate(ask("stopped", seed=3, max_new=16, temperature=0.0, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[:cut]
    assert len(stopped.logprobs) == cut


def test_samples_differ_by_seed(awake):
    prompt = ask("x").token_ids
    requests = [Request(f"s{i}", prompt, i, Sampling(1.5, 16, ()), group=1) for i in range(8)]
    assert len({done.token_ids for done in awake.generate(*requests)}) > 1


def test_abort_returns_what_there_is_and_it_can_be_continued(awake):
    """More requests than any engine runs at once: some are cut, some may not have begun. They are so long that an abort
    that is late on a busy machine still finds some on their way.
    """
    limit = 600
    requests = [ask(f"long {i}", i, length=10, max_new=limit) for i in range(24)]

    async def cut_short() -> list[Completion]:
        tasks = [asyncio.create_task(awake.engine.generate(r)) for r in requests]
        probe = ask("probe", 99, length=4, max_new=8)
        await awake.engine.generate(probe)
        await awake.engine.abort()
        return await asyncio.wait_for(asyncio.gather(*tasks), timeout=600)

    partial = awake.run(cut_short())
    assert {done.finish_reason for done in partial} <= {"abort", "length"}
    cut = [(r, done) for r, done in zip(requests, partial, strict=True) if done.finish_reason == "abort"]
    assert cut
    assert all(len(done.logprobs) == len(done.token_ids) < limit for _, done in cut)
    rest = [
        Request(
            r.request_id,
            r.token_ids + done.token_ids,
            r.seed,
            Sampling(1.0, min(150, limit - len(done.token_ids)), ()),
            sampled=len(done.token_ids),
        )
        for r, done in cut
    ]
    for request, done in zip(rest, awake.generate(*rest), strict=True):
        assert len(done.token_ids) == request.sampling.max_new_tokens
        expected = reference(awake.model, request, done)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=awake.logprob_tolerance, rtol=0)


def test_abort_of_an_idle_engine_is_harmless(awake):
    awake.run(awake.engine.abort())
    assert awake.generate(ask("after"))[0].finish_reason == "length"


def test_sleep_and_wake_can_be_repeated_and_weights_must_be_pushed_again(awake):
    engine = awake.engine
    for _ in range(2):
        awake.run(engine.sleep())
        assert engine.state is EngineState.ASLEEP
    with pytest.raises(EngineError):
        awake.generate(ask("asleep"))
    for _ in range(2):
        awake.run(engine.wake(("weights",)))
        assert engine.state is EngineState.WEIGHTS_ONLY
    with pytest.raises(EngineError):
        awake.generate(ask("no cache"))
    for _ in range(2):
        awake.run(engine.wake(("kv_cache",)))
        assert engine.state is EngineState.AWAKE
    with pytest.raises(EngineError):
        awake.generate(ask("empty weights"))
    awake.push()
    assert awake.generate(ask("full again"))[0].weight_version == awake.version


def test_health(awake):
    assert awake.run(awake.engine.health())
