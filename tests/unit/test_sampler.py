"""Sampling strategies on a real engine with a real (tiny, untrained) model; only the verdict is made up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from colocate_grpo.config import Config
from colocate_grpo.data import Cursor, Prompt, PromptSet
from colocate_grpo.reward.pool import RewardTask
from colocate_grpo.rollout.embedded import EmbeddedEngine
from colocate_grpo.rollout.sampler import Sampler
from colocate_grpo.rollout.samples import SampleRunner
from colocate_grpo.trajectory import Verdict

EOS = 1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
        "max_position_embeddings": 512, "eos_token_id": EOS,
    }  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(path)
    return path


class Letters:
    """Decodes token ids to one character each."""

    def decode(self, token_ids, skip_special_tokens):
        return "".join(chr(48 + i) for i in token_ids)


@dataclass
class Judge:
    """Scores by a rule on the text, so that groups with and without variance are known."""

    rule: object

    async def grade(self, task: RewardTask) -> Verdict:
        return Verdict(float(self.rule(task)), "correct")


def parity(task: RewardTask) -> int:
    """Half of the answers of an untrained model."""
    return ord(task.response[0]) % 2 if task.response else 0


def make(model_dir, rule=parity, prompts=12, salt=0, **rollout):
    config = Config.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "data": {"train": "unused"},
            "rollout": {"prompts_per_step": 4, "group_size": 3, "max_new_tokens": 24, "slots": 16, **rollout},
        }
    )
    rows = tuple(
        Prompt(f"p{i}", (2 + i, 3, 4 + i % 3), "0", f"prompt {i}", ({"role": "user", "content": f"prompt {i}"},))
        for i in range(prompts)
    )
    prompt_set = PromptSet("unused", rows, 0, 0, "fingerprint")
    engine = EmbeddedEngine(config, model_dir)
    runner = SampleRunner(engine, Judge(rule), Letters(), lambda progress: None)
    return Sampler(config, Cursor(prompt_set, 0, shuffle=False), runner, (EOS,), salt), engine, model_dir


async def push(engine, model_dir, version):
    weights = Qwen3ForCausalLM.from_pretrained(model_dir).state_dict()
    await engine.begin_update(version)
    await engine.apply_bucket([(n, t) for n, t in weights.items() if n != "lm_head.weight"])
    await engine.end_update()


def collect(made, steps=1, version=0):
    sampler, engine, model_dir = made

    async def all_steps():
        await engine.start()
        batches = []
        for step in range(steps):
            await push(engine, model_dir, version + step)
            batches.append(await sampler.collect(step, version + step))
        await engine.stop()
        return batches

    return asyncio.run(all_steps())


def tokens(batch):
    return [(t.prompt_id, t.sample_index, tuple(t.token_ids)) for t in batch.trajectories]


def test_a_batch_has_its_groups_in_prompt_order(model_dir):
    (batch,) = collect(make(model_dir))
    assert [g.prompt.id for g in batch.groups] == ["p0", "p1", "p2", "p3"]
    assert [t.sample_index for t in batch.trajectories] == [0, 1, 2] * 4
    for t in batch.trajectories:
        assert t.status in ("completed", "truncated")
        assert (t.token_ids[-1] == EOS) == (t.status == "completed")
        assert t.response_length == 24 or t.status == "completed"
        assert [(s.end - s.start, s.version) for s in t.weight_versions] == [(t.response_length, 0)]
        assert all(lp < 0 for lp, m in zip(t.rollout_logprobs, t.loss_mask, strict=True) if m)


def test_the_same_seed_gives_the_same_batch_and_a_salt_another_one(model_dir):
    first, again, salted = (collect(make(model_dir, salt=salt))[0] for salt in (0, 0, 1))
    assert tokens(first) == tokens(again)
    assert tokens(first) != tokens(salted)


def test_dynamic_sampling_replaces_groups_without_variance(model_dir):
    def rule(task):  # prompts 0-2 are always right
        return 1 if task.prompt in ("prompt 0", "prompt 1", "prompt 2") else parity(task)

    (batch,) = collect(make(model_dir, rule, dynamic_sampling={"enabled": True, "max_rounds": 8}))
    assert len(batch.groups) == 4
    assert all(g.order > 2 for g in batch.groups)
    assert batch.counts["rollout/groups_dropped"] >= 3
    assert [g.order for g in batch.groups] == sorted(g.order for g in batch.groups)


def test_dynamic_sampling_is_bounded_and_still_fills_the_batch(model_dir):
    made = make(model_dir, lambda task: 1, dynamic_sampling={"enabled": True, "max_rounds": 2})
    (batch,) = collect(made)
    assert len(batch.groups) == 4
    assert made[0].cursor.next_index == 8  # two rounds of four, no more
    assert batch.counts["rollout/groups_dropped"] == 4


def test_over_sampling_hands_unused_prompts_back(model_dir):
    made = make(model_dir, over_sampling=1.5)
    first, second = collect(made, steps=2)
    assert len(first.groups) == len(second.groups) == 4
    used = [g.prompt.id for b in (first, second) for g in b.groups]
    assert len(set(used)) == 8
    unused = {f"p{i}" for i in range(10)} - set(used)
    assert unused <= set(made[0].cursor.returned) | {f"p{i}" for i in range(8, 12)}


def test_partial_samples_go_on_with_their_tokens_and_versions(model_dir):
    made = make(model_dir, over_sampling=2.0, partial={"enabled": True, "max_staleness": 5})
    batches = collect(made, steps=4)
    trajectories = [t for b in batches for t in b.trajectories]
    mixed = [t for t in trajectories if len({s.version for s in t.weight_versions}) > 1]
    assert mixed, "no sample was cut by the abort and continued"
    for t in mixed:
        spans = t.weight_versions
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert spans[-1].end == len(t.token_ids)
        assert sum(s.end - s.start for s in spans) == t.response_length <= 24
        assert t.verdict is not None


def test_stale_samples_start_anew(model_dir):
    made = make(model_dir, over_sampling=2.0, partial={"enabled": True, "max_staleness": 1})
    sampler = made[0]
    collect(made)
    partial = [t for g in sampler.unfinished for t in g.samples if t.weight_versions]
    assert partial
    (batch,) = collect(made, version=9)
    assert batch.counts["rollout/stale_samples"] == len(partial)
    assert {s.version for t in batch.trajectories for s in t.weight_versions} == {9}


def test_a_restart_goes_on_in_the_same_order_with_the_same_tokens(model_dir):
    options = {"over_sampling": 1.5, "partial": {"enabled": True, "max_staleness": 5}}
    whole = make(model_dir, **options)
    expected = collect(whole, steps=3)
    first = make(model_dir, **options)
    collect(first)
    state = first[0].state()
    resumed = make(model_dir, **options)
    resumed[0].restore(state, {p.id: p for p in resumed[0].cursor.prompts.rows})

    async def rest():
        sampler, engine, _ = resumed
        await engine.start()
        batches = []
        for step in (1, 2):
            await push(engine, model_dir, step)
            batches.append(await sampler.collect(step, step))
        await engine.stop()
        return batches

    assert [tokens(b) for b in asyncio.run(rest())] == [tokens(b) for b in expected[1:]]
