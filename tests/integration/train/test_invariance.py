"""One process: the gradient is that of the plain loss for any batch, order, cap and aggregation; every option of the
algorithm against the same thing written out in plain transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_models as small
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colocate_grpo.memory.saver import make_saver
from colocate_grpo.train.batch import make_samples
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.step import Trainer

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3", **TINY)


@pytest.fixture(scope="module")
def parallel(model_dir: Path) -> Iterator[Parallel]:
    joined = Parallel.initialise(small.make_config(model_dir))
    yield joined
    joined.shutdown()


def make_trainer(model_dir: Path, parallel: Parallel, **sections: Any) -> Trainer:
    config = small.make_config(model_dir, **sections)
    return Trainer.build(config, parallel, make_saver(config, parallel.device), model_dir)


def gradient(trainer: Trainer, batch: list[small.Trajectory]) -> torch.Tensor:
    samples = make_samples(batch, trainer.config)
    for sample in samples:
        sample.old_logprobs = sample.rollout_logprobs
    trainer.accumulate(samples)
    return torch.cat([p.main_grad.flatten() for p in trainer.policy.parameters()])


def plain_gradient(trainer: Trainer, model: Any, batch: list[small.Trajectory], aggregation: str) -> float:
    """Norm of the plain loss's gradient: independent of parameter order and layout."""
    model.zero_grad()
    advantages = [s.advantage for s in make_samples(batch, trainer.config)]
    small.plain_loss(model, batch, advantages, aggregation).backward()
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


@st.composite
def batches(draw: st.DrawFn) -> list[small.Trajectory]:
    """1 to 64 trajectories of 2 to 2,000 tokens, groups of uneven size."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    count, longest = draw(st.sampled_from([(1, 2000), (3, 2000), (8, 700), (64, 60)]))
    lengths = draw(st.lists(st.integers(2, longest), min_size=1, max_size=count))
    return [
        small.make_trajectory(rng, prompt := rng.randint(1, n - 1), n - prompt, i, group=rng.randrange(4))
        for i, n in enumerate(lengths)
    ]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches(), st.integers(32, 3000), st.randoms(use_true_random=False))
def test_order_and_cap_do_not_matter(
    model_dir: Path, parallel: Parallel, batch: list[small.Trajectory], cap: int, rng: random.Random
) -> None:
    shuffled = rng.sample(batch, len(batch))
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        algorithm = {"aggregation": aggregation, "advantage": "dr_grpo"}
        trainer = make_trainer(model_dir, parallel, algorithm=algorithm, train={"max_tokens_per_microbatch": cap})
        first = gradient(trainer, batch)
        whole = make_trainer(model_dir, parallel, algorithm=algorithm, train={"max_tokens_per_microbatch": 200_000})
        second = gradient(whole, shuffled)
        norm = plain_gradient(trainer, small.build("qwen3", **TINY), batch, aggregation)
        assert (first - second).norm().item() <= 1e-5 * norm + 1e-12
        assert first.norm().item() == pytest.approx(norm, rel=1e-5, abs=1e-12)


def test_skipped_samples_still_count(model_dir: Path, parallel: Parallel) -> None:
    """Groups without variance cost no forward pass, and the gradient is the one that they would have given."""
    batch = small.make_batch(3, groups=3)
    for trajectory in batch:
        if trajectory.group_id == 1:
            trajectory.verdict = small.Verdict(1.0, "correct")
    trainer = make_trainer(model_dir, parallel)
    packed = trainer.step(batch, 0)["train/packed_tokens"]
    assert packed == sum(len(t.token_ids) for t in batch if t.group_id != 1)
    trainer = make_trainer(model_dir, parallel)
    norm = plain_gradient(trainer, small.build("qwen3", **TINY), batch, "token_mean")
    assert gradient(trainer, batch).norm().item() == pytest.approx(norm, rel=1e-5)


def test_batch_without_any_signal(model_dir: Path, parallel: Parallel) -> None:
    """All rewards equal: nothing moves, everything is measured, nothing is NaN."""
    batch = small.make_batch(4)
    for trajectory in batch:
        trajectory.verdict = small.Verdict(0.0, "wrong")
    trainer = make_trainer(model_dir, parallel)
    before = trainer.checksums()
    metrics = trainer.step(batch, 0)
    assert trainer.checksums() == before
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/entropy_loss"] > 1.0
    assert metrics["train/tokens"] == sum(t.response_length for t in batch)


def test_only_failures(model_dir: Path, parallel: Parallel) -> None:
    batch = small.make_batch(4)
    for trajectory in batch:
        trajectory.status, trajectory.verdict = "failed", None
    metrics = make_trainer(model_dir, parallel).step(batch, 0)
    assert metrics["train/tokens"] == 0.0
    assert all(value == value for value in metrics.values())


def test_who_counts_in_the_loss(model_dir: Path, parallel: Parallel) -> None:
    """Failed ones never; truncated ones not under the overlong filter, though their group's mean sees them."""
    batch = small.make_batch(6, groups=1, size=4)
    batch[0].status, batch[0].verdict = "failed", None
    batch[1].status = "truncated"
    kept = make_samples(batch, small.make_config(model_dir, algorithm={"advantage": "dr_grpo"}))
    filtered = make_samples(
        batch, small.make_config(model_dir, algorithm={"advantage": "dr_grpo"}, rollout={"overlong_filter": True})
    )
    assert [s.index for s in kept] == [1, 2, 3]
    assert [s.index for s in filtered] == [2, 3]
    assert [s.advantage for s in filtered] == [s.advantage for s in kept[1:]]


def plain_option(model: Any, batch: list[small.Trajectory], advantages: list[float], option: str) -> torch.Tensor:
    """Loss of one algorithm option from its formula, sequence by sequence, old policy = rollout."""
    tokens = sum(t.response_length for t in batch)
    with torch.no_grad():
        frozen = [small.plain_logprobs(small.build("qwen3", **TINY), t)[0] for t in batch]
    total = torch.zeros(())
    for trajectory, advantage, reference in zip(batch, advantages, frozen, strict=True):
        logprob, entropy = small.plain_logprobs(model, trajectory)
        old = torch.tensor([p for p, m in zip(trajectory.rollout_logprobs, trajectory.loss_mask, strict=True) if m])
        ratio = (logprob - old).exp()
        if option == "gspo":
            ratio = (logprob - old).mean().exp().expand_as(logprob)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        if option == "cispo":
            loss = -ratio.detach().clamp(0.8, 1.28) * advantage * logprob
        if option == "entropy":
            loss = loss - 0.1 * entropy
        if option == "kl":
            loss = loss + 0.5 * ((reference - logprob).exp() - 1 - (reference - logprob))
        total = total + loss.sum() / tokens
    return total


@pytest.mark.parametrize(
    ("option", "algorithm"),
    [
        ("gspo", {"ratio": "gspo"}),
        ("cispo", {"ratio": "cispo"}),
        ("entropy", {"entropy_coef": 0.1}),
        ("kl", {"kl": {"coef": 0.5, "estimator": "k3"}}),
    ],
)
def test_option_is_its_formula(model_dir: Path, parallel: Parallel, option: str, algorithm: dict[str, Any]) -> None:
    """Two steps, so that the policy has left its reference; the gradient norm of the second one."""
    sections = {"algorithm": algorithm, "rollout": {"partial": {"enabled": True}}}
    trainer = make_trainer(model_dir, parallel, train={"optimizer": {"lr": 1e-3, "grad_clip": 0.0}}, **sections)
    model = small.build("qwen3", **TINY)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(2):
        batch = small.make_batch(40 + step)
        metrics = trainer.step(batch, step)
        plain.zero_grad()
        loss = plain_option(model, batch, [s.advantage for s in make_samples(batch, trainer.config)], option)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        plain.step()
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_old_logprobs_are_computed_before_the_first_of_several_updates(model_dir: Path, parallel: Parallel) -> None:
    """With two updates a rollout the second one's ratio is no longer 1; with one it is, and no pass is made."""
    batch = small.make_batch(8, groups=4)
    once = make_trainer(model_dir, parallel, train={"optimizer": {"lr": 1e-2}}).step(batch, 0)
    assert once["train/ppo_kl"] == 0.0
    trainer = make_trainer(
        model_dir,
        parallel,
        train={"updates_per_rollout": 2, "optimizer": {"lr": 1e-2}},
        rollout={"prompts_per_step": 4},
    )
    assert trainer.step(batch, 0)["train/ppo_kl"] != 0.0


def test_temperature_of_the_rollout_scales_the_trainer(model_dir: Path, parallel: Parallel) -> None:
    batch = small.make_batch(9)
    trainer = make_trainer(model_dir, parallel, rollout={"temperature": 0.5})
    model = small.build("qwen3", **TINY)
    with torch.no_grad():
        for found, trajectory in zip(trainer.logprobs(batch), batch, strict=True):
            expected, _ = small.plain_logprobs(model, trajectory, temperature=0.5)
            assert (torch.from_numpy(found) - expected).abs().max() <= 5e-6


def test_two_runs_are_bit_equal(model_dir: Path, parallel: Parallel) -> None:
    runs = []
    for _ in range(2):
        trainer = make_trainer(model_dir, parallel, train={"optimizer": {"lr": 1e-3}})
        losses = [trainer.step(small.make_batch(50 + step), step)["train/grad_norm"] for step in range(3)]
        runs.append((losses, trainer.checksums()))
    assert runs[0] == runs[1]


def test_coefficient_zero_keeps_no_reference(model_dir: Path, parallel: Parallel) -> None:
    assert make_trainer(model_dir, parallel).reference is None


def test_sleep_drops_everything_and_wake_brings_it_back(model_dir: Path, parallel: Parallel) -> None:
    """While all tags sleep no storage of the trainer holds a byte; afterwards training goes on as if nothing was."""
    tags = ("weights", "optimizer", "gradients")
    rested, restless = (make_trainer(model_dir, parallel, train={"optimizer": {"lr": 1e-3}}) for _ in range(2))
    for step in range(3):
        rested.checksums()  # must not pin the storages
        rested.sleep(tags)
        owned = [*rested.weight_buffers(), *rested.grad_buffers(), *rested.optimizer_tensors()]
        assert owned
        assert all(t.untyped_storage().size() == 0 for t in owned)
        assert all(p.untyped_storage().size() == 0 for p in rested.policy.parameters())
        rested.wake(tags)
        batch = small.make_batch(60 + step)
        a, b = rested.step(batch, step), restless.step(batch, step)
        assert a["train/grad_norm"] == b["train/grad_norm"]
    assert rested.checksums() == restless.checksums()
    assert not any(name.endswith("inv_freq") for name, _ in rested.policy.named_buffers())


def test_buffers_do_not_grow_with_the_number_of_microbatches(model_dir: Path, parallel: Parallel) -> None:
    from colocate_grpo.train.peak import peak_bytes

    batch = small.make_batch(10, groups=4)
    trainer = make_trainer(model_dir, parallel, train={"max_tokens_per_microbatch": 64})
    trainer.step(batch, 0)
    few = peak_bytes(lambda: trainer.step(batch[:4], 1), parallel.device)
    many = peak_bytes(lambda: trainer.step(batch, 2), parallel.device)
    assert many <= 1.3 * few
