"""One server of two workers."""

import pytest
import tiny_model
from conftest import request
from test_pool import greedy_reference

from colocate_grpo.weights.push import verify


@pytest.fixture(scope="module")
def server(start_pool):
    return start_pool(tp=2)


@pytest.mark.parametrize("version", [1, 2])
def test_sharded_weights_are_the_trainers_bit_for_bit(server, version):
    server.push(version)
    server.run(verify(tiny_model.Source(server.model), [server.pool]))
    assert len(server.run(server.pool.engines[0].server_checksums())) == 2
    requests = [request(i, 32, temperature=0.0) for i in range(6)]
    assert [c.token_ids for c in server.generate(requests)] == greedy_reference(server.model, requests)


def test_seeds_work_over_two_workers(server):
    requests = [request(i, 24) for i in range(16)]
    assert [c.token_ids for c in server.generate(requests)] == [
        c.token_ids for c in server.generate(requests[::-1])[::-1]
    ]
