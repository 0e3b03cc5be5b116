"""The rollout model against a real server's own counters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import server_counters
from server_counters import ENGINE, RequestSet

from colocate_grpo.plan.rollout import Latency, Scheduler
from colocate_grpo.rollout.sglang_process import ServerProcess

SETS = [
    RequestSet("shared prompts, room for all", groups=8, samples=4, prompt=24, limit=50),
    RequestSet("more than the cache holds", groups=14, samples=2, prompt=60, limit=250),
    RequestSet("answers longer than admission expects", groups=20, samples=1, prompt=20, limit=200, rarely_ends=True),
    RequestSet("prompts longer than a chunk", groups=5, samples=2, prompt=650, limit=30),
]
FREE = Latency(prefill=lambda tokens: 0.0, decode=lambda requests, kv_tokens: 0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = server_counters.start(tmp_path_factory.mktemp("server"))
    yield process
    process.end()


@pytest.mark.parametrize("wanted", SETS, ids=lambda s: s.name)
def test_iterations_and_peak_kv_equal_the_servers_counters(server: ServerProcess, wanted: RequestSet) -> None:
    jobs, counters = server_counters.measure(server, wanted)
    outcome = Scheduler(jobs, ENGINE, FREE).run()
    assert outcome.iterations == pytest.approx(counters.prefills + counters.decodes, rel=0.05)
    assert outcome.peak_kv == pytest.approx(counters.peak_kv, rel=0.05)
    assert outcome.generated == sum(job.output for job in jobs)
    assert bool(outcome.retractions) == counters.retracted
