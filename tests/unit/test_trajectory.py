"""The record: what is dumped is what is read, and what it counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from colocate_grpo.trajectory import Trajectory, Verdict, VersionSpan, read_trajectories, write_trajectories

logprobs = st.floats(-50, 0, allow_nan=False)
verdicts = st.one_of(
    st.none(), st.builds(Verdict, st.one_of(st.none(), st.floats(-1, 1)), st.text(max_size=9), st.text(max_size=9))
)


@st.composite
def trajectories(draw):
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    total = prompt + response
    return Trajectory(
        prompt_id=draw(st.text(max_size=8)),
        group_id=draw(st.integers(0, 99)),
        sample_index=draw(st.integers(0, 7)),
        seed=draw(st.integers(0, 2**63 - 1)),
        token_ids=draw(st.lists(st.integers(0, 200_000), min_size=total, max_size=total)),
        loss_mask=[0] * prompt + [1] * response,
        rollout_logprobs=[0.0] * prompt + draw(st.lists(logprobs, min_size=response, max_size=response)),
        weight_versions=[VersionSpan(prompt, total, draw(st.integers(0, 9)))] if response else [],
        status=draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
        verdict=draw(verdicts),
        metadata=draw(st.dictionaries(st.text(max_size=4), st.booleans(), max_size=2)),
    )


@given(batch=st.lists(trajectories(), max_size=4))
def test_a_dump_is_read_back_equal(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("dump") / "step_0.jsonl.zst"
    write_trajectories(path, batch)
    assert list(read_trajectories(path)) == batch
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@given(t=trajectories())
def test_a_failed_trajectory_has_no_score(t):
    expected = None if t.status == "failed" or t.verdict is None else t.verdict.score
    assert t.score == expected
    assert t.response_length == sum(s.end - s.start for s in t.weight_versions)
