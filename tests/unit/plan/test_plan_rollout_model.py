"""Properties of the rollout model, and a schedule that is small enough to do by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_grpo.plan.lengths import LengthModel
from colocate_grpo.plan.rollout import Engine, Job, Latency, Scheduler

COUNTING = Latency(prefill=lambda tokens: 1.0, decode=lambda requests, kv_tokens: 1.0)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Job], Engine]:
    limit = draw(st.integers(1, 300))
    prompts = draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    samples = draw(st.integers(1, 6))
    outputs = draw(st.lists(st.integers(1, limit), min_size=len(prompts) * samples, max_size=len(prompts) * samples))
    jobs = [Job(i // samples, prompts[i // samples], n, limit) for i, n in enumerate(outputs)]
    capacity = draw(st.integers(max(prompts) + limit + 2, 4000))
    return jobs, Engine(capacity, draw(st.integers(1, 64)), draw(st.integers(16, 512)))


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_tokens_are_conserved_and_the_capacity_is_never_exceeded(workload: tuple[list[Job], Engine]) -> None:
    jobs, engine = workload
    outcome = Scheduler(jobs, engine, COUNTING).run()
    assert outcome.generated == sum(job.output for job in jobs)
    assert outcome.peak_kv <= engine.kv_tokens
    assert sorted(outcome.finished_groups) == sorted({job.group for job in jobs})
    assert outcome.iterations >= max(job.output for job in jobs)
    assert outcome.seconds == pytest.approx(outcome.iterations)


def test_two_requests_by_hand() -> None:
    """One prefill of 10 + 20 tokens gives both a first token; then 2 decode steps for both and 3 for one alone."""
    outcome = Scheduler([Job(0, 10, 3, 8), Job(1, 20, 6, 8)], Engine(1000), COUNTING).run()
    assert (outcome.prefills, outcome.decodes, outcome.prefilled) == (1, 5, 30)
    # Fullest after the second step: prompts 30, two tokens of each; alone, the long one only reaches 20 + 5.
    assert outcome.peak_kv == 34


def test_samples_of_a_group_hold_their_prompt_once() -> None:
    """The prompt is prefilled four times at once, then kept once: 100 tokens and 9 of each answer."""
    outcome = Scheduler([Job(0, 100, 10, 10)] * 4, Engine(2000), COUNTING).run()
    assert outcome.peak_kv == 100 + 4 * 9


def test_less_room_means_more_iterations_and_retractions() -> None:
    jobs = [Job(i, 50, 550 + i, 600) for i in range(30)]
    roomy = Scheduler(jobs, Engine(100_000), COUNTING).run()
    tight = Scheduler(jobs, Engine(2_000), COUNTING).run()
    assert roomy.retractions == 0
    assert tight.retractions > 0
    assert tight.iterations > roomy.iterations


def test_tail_is_cut_once_enough_groups_are_done() -> None:
    jobs = [Job(i, 10, 10 if i < 3 else 500, 500) for i in range(4)]
    cut = Scheduler(jobs, Engine(10_000), COUNTING, enough_groups=3).run()
    assert cut.iterations == 10
    assert sorted(cut.finished_groups) == [0, 1, 2]


@pytest.mark.parametrize(("median", "truncated", "mean"), [(3777, 0.211, 4476), (7400, 0.461, 6403)])
def test_lengths_have_the_published_mean(median: float, truncated: float, mean: float) -> None:
    """The published run gives median, share at the limit and mean; two of them fix the model, the third checks it."""
    lengths = LengthModel(8192, median, truncated).sample(256)
    assert sum(lengths) / 256 == pytest.approx(mean, rel=0.08)
    assert sum(n == 8192 for n in lengths) / 256 == pytest.approx(truncated, abs=0.005)
