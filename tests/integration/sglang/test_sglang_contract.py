"""The promises of every engine, on one real server of two workers (untied Llama, fp32)."""

import pytest
import small_models
from sglang_runs import TOKEN_TIMEOUT_S
from test_engine_contract import *  # noqa: F403
from test_engine_contract import Subject

from colocate_grpo.rollout.sglang_pool import SglangPool

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def subject(tmp_path_factory, run_tag, engine_environment):
    directory = small_models.write("llama", tmp_path_factory.mktemp("model"))
    rollout = {"engine": "sglang", "tp": 2, "verify_weights_every": 1, "token_timeout": TOKEN_TIMEOUT_S}
    config = small_models.make_config(directory, rollout=rollout)
    subject = Subject(SglangPool(config, tmp_path_factory.mktemp("run"), directory), directory, logprob_tolerance=1e-4)
    subject.run(subject.engine.start())
    subject.run(subject.engine.sleep())
    yield subject
    subject.run(subject.engine.stop())
    subject.runner.close()


def test_both_workers_hold_their_shards(awake):
    ranks = awake.run(awake.engine.engines[0].server_checksums())
    assert len(ranks) == 2
    assert ranks[0]["model.layers.0.mlp.down_proj.weight"] != ranks[1]["model.layers.0.mlp.down_proj.weight"]


def test_seeds_work_over_two_workers(awake):
    requests = [ask(f"seed {i}", i) for i in range(16)]  # noqa: F405
    forwards = [done.token_ids for done in awake.generate(*requests)]
    assert [done.token_ids for done in awake.generate(*requests[::-1])][::-1] == forwards
