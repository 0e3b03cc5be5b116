"""Two real servers as one engine: truth of tokens, weights and versions, balance, speed; then kills."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import aiohttp
import httpx
import psutil
import pytest
import sglang_tiny_model as tiny_model
import torch
from sglang_runs import STRANGERS, TOKEN_TIMEOUT_S, request

from colocate_grpo import processes
from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.engine import EngineError, EngineState
from colocate_grpo.weights.push import push, verify


def greedy_reference(model, requests):
    return [
        tuple(
            model.generate(
                torch.tensor([r.token_ids]), max_new_tokens=r.sampling.max_new_tokens, do_sample=False,
                eos_token_id=tiny_model.EOS, pad_token_id=tiny_model.EOS,
            )[0, len(r.token_ids) :].tolist()
        )
        for r in requests
    ]  # fmt: skip


def start_rollout(servers, requests):
    """The tasks of a rollout that runs: each engine has sampled something."""

    async def start():
        tasks = [asyncio.ensure_future(servers.pool.generate(r)) for r in requests]
        began = time.monotonic()
        while not all(e.load and e.last_token > began for e in servers.pool.live):
            assert time.monotonic() - began < TOKEN_TIMEOUT_S
            await asyncio.sleep(0.01)
        return tasks

    return servers.run(start())


def finish(servers, tasks):
    async def wait():
        return await asyncio.gather(*tasks)

    return servers.run(wait())


def assert_complete(requests, completions):
    assert [c.request_id for c in completions] == [r.request_id for r in requests]
    assert all(c.finish_reason in ("stop", "length") for c in completions)


pytestmark = pytest.mark.timeout(1800)  # a server needs minutes to import on a busy machine

# -- before any weights ---------------------------------------------------------------------------------------


def test_nothing_is_generated_before_the_first_push(servers):
    assert servers.pool.state is EngineState.AWAKE
    assert servers.run(servers.pool.health())
    with pytest.raises(EngineError, match="with weights -1"):
        servers.generate([request(0, 4)])


def test_engines_without_work_leave_the_cores_to_others(servers):
    def cpu_seconds():
        return sum(sum(p.cpu_times()[:2]) for p in servers.processes())

    before, window_s = cpu_seconds(), 4.0
    time.sleep(window_s)
    assert cpu_seconds() - before < 0.25 * window_s, "a scheduler that polls takes a whole core"


def test_requests_without_the_key_are_refused(servers):
    for engine in servers.pool.engines:
        url = engine.process.url
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path, body in (
                ("/generate", {"input_ids": [5]}),
                ("/flush_cache", {}),
                ("/update_weights_from_tensor", {}),
            ):
                assert httpx.post(url + path, json=body, headers=headers, trust_env=False).status_code == 401
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{_other_address()}:{engine.process.port}/health", timeout=5, trust_env=False)


def _other_address() -> str:
    addresses = [a.address for n in psutil.net_if_addrs().values() for a in n if a.family.name == "AF_INET"]
    return next((a for a in addresses if not a.startswith("127.")), "127.0.0.2")


def test_the_key_is_in_no_command_line_and_no_file_that_others_read(servers):
    key = servers.pool.engines[0].process.api_key
    found = servers.processes()
    assert len(found) >= 6  # launcher, scheduler and detokenizer of two engines
    assert not any(key in argument for process in found for argument in process.cmdline())
    holding = [f for f in servers.directory.rglob("*") if f.is_file() and key.encode() in f.read_bytes()]
    assert {f.name for f in holding} >= {"engine_0.yaml", "engine_1.yaml"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in holding} == {0o600}
    assert key not in servers.pool.engines[0].process.log_tail()


def test_only_listed_variables_reach_an_engine(servers, run_tag):
    for process in servers.processes():
        environment = process.environ()
        assert not STRANGERS.keys() & environment.keys()
        assert environment[processes.RUN_ID].startswith(run_tag)


# -- weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_after_a_push_tokens_log_probs_and_checksums_are_the_trainers(servers, version):
    servers.push(version)
    servers.run(verify(tiny_model.Source(servers.model), [servers.pool]))
    requests = [request(i, 32, temperature=0.0) for i in range(6)]
    completions = servers.generate(requests)
    assert [c.token_ids for c in completions] == greedy_reference(servers.model, requests)
    assert all(c.weight_version == version for c in completions)
    for r, c in zip(requests, completions, strict=True):
        with torch.no_grad():
            logits = servers.model(torch.tensor([[*r.token_ids, *c.token_ids]])).logits[0, len(r.token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(c.logprobs)).abs().max() < 1e-3


def test_the_embedded_engine_gives_the_same_tokens(servers):
    embedded = EmbeddedEngine(servers.config, servers.model_dir)
    requests = [request(i, 48, temperature=0.0) for i in range(16)]

    async def generate_embedded():
        await embedded.start()
        await push(tiny_model.Source(servers.model), [embedded], 2, bucket_mib=1)
        completions = await asyncio.gather(*[embedded.generate(r) for r in requests])
        await embedded.stop()
        return completions

    ours = servers.generate(requests)
    assert [c.token_ids for c in servers.run(generate_embedded())] == [c.token_ids for c in ours]


def test_a_weight_that_changed_in_an_engine_is_found(servers):
    async def scribble():
        engine = servers.pool.engines[1]
        await engine.begin_update(2, servers.pool._expected)
        await engine.load_views([("model.norm.weight", servers.model.model.norm.weight.detach() * 1.01)])
        await engine.end_update()

    servers.run(scribble())
    with pytest.raises(EngineError, match=r"1 of 24 weights differ .* model\.norm\.weight"):
        servers.run(verify(tiny_model.Source(servers.model), [servers.pool]))
    servers.push(2)


def test_asleep_or_only_half_awake_nothing_is_generated(servers):
    servers.run(servers.pool.sleep())
    servers.run(servers.pool.sleep())
    with pytest.raises(EngineError, match="asleep"):
        servers.generate([request(0, 4)])
    servers.run(servers.pool.wake(("weights",)))
    with pytest.raises(EngineError, match="weights_only"):
        servers.generate([request(0, 4)])
    servers.run(servers.pool.wake())
    with pytest.raises(EngineError, match="no pushed weights"):
        servers.run(servers.pool.engines[0].generate(request(0, 4)))
    servers.push(2)
    assert servers.generate([request(0, 4)])[0].weight_version == 2


def test_wrong_orders_are_errors(servers):
    with pytest.raises(AssertionError, match="KV cache cannot be awake without the weights"):
        servers.run(servers.pool.sleep(("weights",)))
    servers.run(servers.pool.sleep())
    with pytest.raises(AssertionError, match="weights are asleep, wake them before an update"):
        servers.run(servers.pool.begin_update(3))
    with pytest.raises(AssertionError, match="KV cache cannot be awake without the weights"):
        servers.run(servers.pool.wake(("kv_cache",)))
    servers.push(2)
    tasks = start_rollout(servers, [request(i, 192) for i in range(4)])
    with pytest.raises(AssertionError, match="abort first"):
        servers.run(servers.pool.sleep())
    servers.run(servers.pool.abort())
    finish(servers, tasks)


# -- sampling -------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(servers):
    requests = [request(i, 24) for i in range(32)]
    first = servers.generate(requests)
    again = servers.generate(requests[::-1])[::-1]
    alone = servers.generate(requests[:1])
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert first[0].token_ids == alone[0].token_ids
    other_seed = servers.generate([replace(requests[0], seed=7)])
    assert other_seed[0].token_ids != first[0].token_ids


def test_aborted_answers_continue_where_they_stopped(servers):
    requests = [request(i, 192, temperature=0.0) for i in range(12)]
    whole = greedy_reference(servers.model, requests)
    tasks = start_rollout(servers, requests)
    servers.run(servers.pool.abort())
    parts = finish(servers, tasks)
    assert [c.request_id for c in parts] == [r.request_id for r in requests]
    assert any(c.finish_reason == "abort" and c.token_ids for c in parts)
    rest = [
        replace(r, token_ids=(*r.token_ids, *c.token_ids), sampled=len(c.token_ids),
                sampling=replace(r.sampling, max_new_tokens=192 - len(c.token_ids)))
        if c.finish_reason == "abort" else None
        for r, c in zip(requests, parts, strict=True)
    ]  # fmt: skip
    continued = iter(servers.generate([r for r in rest if r]))
    answers = [c.token_ids + (next(continued).token_ids if r else ()) for r, c in zip(rest, parts, strict=True)]
    assert answers == whole


def test_a_request_that_the_server_refuses_is_no_loss_of_the_engine(servers):
    too_long = replace(request(0, 4), token_ids=(5,) * 5000)
    with pytest.raises(EngineError, match="refuses r0"):
        servers.generate([too_long])
    assert len(servers.pool.live) == 2
    assert len(servers.generate([request(0, 4)])) == 1


def test_groups_stay_together_and_engines_are_balanced(servers, monkeypatch):
    served: dict[int, list[int]] = {0: [], 1: []}
    for engine in servers.pool.engines:
        original = engine.generate

        async def spy(r, original=original, index=engine.index):
            served[index].append(r.group)
            return await original(r)

        monkeypatch.setattr(engine, "generate", spy)
    servers.generate([request(i, 8, group=100 + i // 4) for i in range(40)])
    assert not set(served[0]) & set(served[1])
    assert len(served[0]) == len(served[1]) == 20


def test_the_client_is_as_fast_as_a_bare_load_generator(servers):
    """In turns, as often as a busy machine makes it necessary; the neighbours of a pair saw the same machine."""
    requests = [request(i, 96) for i in range(64)]
    generators = [generate_ours, generate_bare]
    ratios = []
    while len(ratios) < 5 or (len(ratios) < 15 and median(ratios) < 0.9):
        speeds = {generate: speed(servers, generate(servers, requests)) for generate in generators}
        ratios.append(speeds[generate_ours] / speeds[generate_bare])
        generators.reverse()
    print(f"client / bare load generator: {[f'{r:.2f}' for r in ratios]}, median {median(ratios):.2f}")
    assert median(ratios) >= 0.9


def speed(servers, work):
    """Tokens a second of a rollout."""
    began = time.monotonic()
    tokens = servers.run(work)
    return tokens / (time.monotonic() - began)


async def generate_ours(servers, requests):
    return sum(len(c.token_ids) for c in await asyncio.gather(*[servers.pool.generate(r) for r in requests]))


async def generate_bare(servers, requests):
    """No streaming, no deadline, no check of the answer, no balance but taking turns."""
    engines = servers.pool.engines

    async def one(index, r):
        sampling = {"temperature": 1.0, "max_new_tokens": r.sampling.max_new_tokens, "sampling_seed": r.seed,
                    "stop_token_ids": list(r.sampling.stop_token_ids)}  # fmt: skip
        body = {"input_ids": list(r.token_ids), "return_logprob": True, "sampling_params": sampling}
        async with http.post(engines[index % len(engines)].process.url + "/generate", json=body) as answer:
            return len((await answer.json())["output_ids"])

    headers = {"Authorization": f"Bearer {engines[0].process.api_key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        return sum(await asyncio.gather(*[one(i, r) for i, r in enumerate(requests)]))


# -- failures: each leaves the pool to the next one -----------------------------------------------------------


def test_a_killed_engine_loses_no_sample_and_is_back_after_the_next_sleep(servers):
    requests = [request(i, 96, temperature=0.0) for i in range(16)]
    tasks = start_rollout(servers, requests)
    os.kill(servers.pool.engines[0].process.process.pid, signal.SIGKILL)
    completions = finish(servers, tasks)
    assert_complete(requests, completions)
    assert [c.token_ids for c in completions] == greedy_reference(servers.model, requests)
    (lost,) = servers.events
    assert (lost["kind"], lost["engine"]) == ("engine_lost", 0)
    assert lost["requests"] > 0
    assert "engine 0 is lost" in lost["message"]

    servers.push(3)
    assert servers.events[-1] == {"kind": "engine_restarted", "engine": 0}
    servers.run(verify(tiny_model.Source(servers.model), [servers.pool]))
    assert [e.index for e in servers.pool.live] == [0, 1]
    assert_both_serve(servers, requests)


def assert_both_serve(servers, requests):
    began = time.monotonic()
    completions = servers.generate(requests)
    assert [c.token_ids for c in completions] == greedy_reference(servers.model, requests)
    assert [e.index for e in servers.pool.engines if e.last_token > began] == [0, 1]


def suspend(engine):
    """SIGSTOP to every process of an engine; returns their tag."""
    for process in processes.find(engine.process.tag):
        process.suspend()
    return engine.process.tag


def test_a_hanging_engine_is_given_up_within_the_deadline(servers):
    servers.events.clear()
    requests = [request(i, 192) for i in range(24)]
    tasks = start_rollout(servers, requests)
    stopped = suspend(servers.pool.engines[1])
    began = time.monotonic()
    assert_complete(requests, finish(servers, tasks))
    assert time.monotonic() - began < 2 * TOKEN_TIMEOUT_S
    (lost,) = servers.events
    assert (lost["kind"], lost["engine"]) == ("engine_lost", 1)
    assert lost["message"] == f"engine 1 hangs: no token for {TOKEN_TIMEOUT_S:g} s"

    servers.push(4)
    assert processes.find(stopped) == []
    assert servers.events[-1] == {"kind": "engine_restarted", "engine": 1}
    assert_both_serve(servers, [request(i, 48, temperature=0.0) for i in range(8)])


def test_an_engine_that_hangs_in_a_push_leaves_the_others_with_the_new_weights(servers):
    class Stopping(tiny_model.Source):
        def hf_buckets(self, max_bytes):
            first, *others = super().hf_buckets(max_bytes // 16)
            yield first
            suspend(servers.pool.engines[0])
            yield from others

    servers.events.clear()
    model = tiny_model.build(5)
    servers.run(servers.pool.sleep())
    servers.run(servers.pool.wake(("weights",)))
    servers.run(push(Stopping(model), [servers.pool], 5, bucket_mib=1))
    servers.run(servers.pool.wake())
    servers.run(verify(tiny_model.Source(model), [servers.pool]))
    (lost,) = servers.events
    assert (lost["kind"], lost["engine"]) == ("engine_lost", 0)
    assert lost["message"] == f"engine 0 hangs: no answer for {TOKEN_TIMEOUT_S:g} s"
    requests = [request(i, 16, temperature=0.0) for i in range(4)]
    assert [c.token_ids for c in servers.generate(requests)] == greedy_reference(model, requests)


def test_without_any_engine_left_the_error_says_why(servers):
    tasks = start_rollout(servers, [request(i, 192) for i in range(8)])
    os.kill(servers.pool.engines[1].process.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="all 2 engines are lost; the last one: engine 1"):
        finish(servers, tasks)


def test_stop_leaves_no_process_no_port_and_no_key(servers):
    servers.run(servers.pool.stop())
    assert servers.processes() == []
    for engine in servers.pool.engines:
        with pytest.raises(httpx.ConnectError):
            httpx.get(engine.process.url + "/health", trust_env=False)
        assert not engine.process.options_path.exists()
    assert list(Path(servers.directory, "control").iterdir()) == []
