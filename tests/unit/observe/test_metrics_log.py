"""Which rows count: compared with a bookkeeper who follows every run through its crashes and rollbacks."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_grpo.observe.events import EventLog, read_events
from colocate_grpo.observe.jsonl import append_row
from colocate_grpo.observe.metrics import MetricsLog, read_rows, view

Actions = st.lists(
    st.tuples(st.sampled_from(["train", "train", "train", "crash", "silent crash", "rollback"]), st.integers(0, 6)),
    max_size=40,
)


class Bookkeeper:
    """A run on paper: what was done after the last state that was gone back to."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.attempt, self.work = run_dir, 1, 0
        self.steps: dict[int, int] = {}
        self.evaluations: dict[int, int] = {}
        self.log = MetricsLog(run_dir, 1)

    def train(self) -> None:
        step = len(self.steps)
        self.work += 1
        self.steps[step] = self.work
        self.log.append("step", step, {"train/loss": self.work})
        if step % 2:
            self.evaluations[step] = self.work
            self.log.append("eval", step, {"eval/a": self.work, "protocol/a": "p", "updates": step + 1})

    def go_back(self, kept: int) -> None:
        self.steps = {step: work for step, work in self.steps.items() if step <= kept}
        self.evaluations = {step: work for step, work in self.evaluations.items() if step <= kept}
        self.attempt += 1
        self.log = MetricsLog(self.run_dir, self.attempt)

    def act(self, action: str, far: int) -> None:
        """`far`: how many steps a crash or a rollback takes away."""
        kept = max(-1, len(self.steps) - 1 - far)
        if action == "train":
            self.train()
        elif action == "rollback":
            self.log.append("rollback", kept, {"from": len(self.steps) - 1, "rollback": 1, "reason": "r"})
            self.go_back(kept)
        else:
            self.go_back(kept)
            if action == "crash":
                self.log.append("attempt", kept, {})
            else:  # killed once more before it could say so; the next step is done anew all the same
                self.train()


@settings(max_examples=300, deadline=None)
@given(Actions)
def test_what_counts_is_what_a_bookkeeper_says(actions: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as directory:
        book = Bookkeeper(Path(directory))
        for action, far in actions:
            book.act(action, far)
        counted = view(read_rows(book.run_dir))
        assert {step: row["train/loss"] for step, row in counted.steps.items()} == book.steps
        assert {p.step: p.accuracy for p in counted.evaluations} == book.evaluations


def test_what_a_rollback_removes_is_told(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, 1)
    for step in range(5):
        first.append("step", step, {})
    first.append("eval", 3, {"eval/a": 0.5, "protocol/a": "p"})
    first.append("rollback", 1, {"from": 4, "rollback": 1, "reason": "entropy rises"})
    MetricsLog(tmp_path, 2).append("attempt", 1, {})
    (removal,) = view(read_rows(tmp_path)).removals
    assert (removal.cause, removal.kept, removal.came_from, removal.steps) == ("rollback", 1, 4, [2, 3, 4])
    assert removal.reason == "entropy rises"
    assert [(p.name, p.step, p.accuracy) for p in removal.evaluations] == [("a", 3, 0.5)]


def test_the_untouched_model_is_never_removed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 1)
    for repeat in range(3):
        log.append("eval", 0, {"eval/a": 0.1 * repeat, "protocol/a": "p", "baseline": repeat, "updates": 0})
    log.append("step", 0, {})
    log.append("eval", 0, {"eval/a": 0.9, "protocol/a": "p", "updates": 1})
    log.append("rollback", -1, {"from": 0, "rollback": 1, "reason": "r"})
    counted = view(read_rows(tmp_path))
    assert [(p.baseline, p.updates) for p in counted.evaluations] == [(0, 0), (1, 0), (2, 0)]
    assert counted.steps == {}


def test_protocols_and_sets_are_told_apart(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 1)
    log.append("eval", 3, {"eval/a": 0.1, "eval/a/stderr": 0.01, "protocol/a": "p", "eval/b": 0.2, "protocol/b": "p"})
    log.append("eval", 3, {"eval/a": 0.3, "protocol/a": "q"})
    log.append("eval", 3, {"eval/a": 0.4, "protocol/a": "q"})
    points = view(read_rows(tmp_path)).evaluations
    assert [(p.name, p.protocol, p.accuracy) for p in points] == [("a", "p", 0.1), ("a", "q", 0.4), ("b", "p", 0.2)]
    assert points[0].values == {"accuracy": 0.1, "stderr": 0.01}


def test_a_damaged_line_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MetricsLog(tmp_path, 1).append("step", 0, {"a": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    with caplog.at_level(logging.WARNING):
        rows = read_rows(tmp_path)
    assert len(rows) == 1
    assert "metrics.jsonl:2: damaged line left out" in caplog.text


def test_series_leave_out_steps_without_the_metric(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 1)
    rows: list[dict[str, float]] = [{"a": 1.0}, {}, {"a": 3}]
    for step, values in enumerate(rows):
        log.append("step", step, values)
    assert view(read_rows(tmp_path)).series("a") == ([0, 2], [1.0, 3.0])


def test_reserved_names_and_unknown_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="reserved"):
        MetricsLog(tmp_path, 1).append("step", 0, {"time": 1.0})
    with pytest.raises(AssertionError, match="engine_gone"):
        EventLog(tmp_path, 1).emit("engine_gone")


def test_events_come_back_in_order(tmp_path: Path) -> None:
    EventLog(tmp_path, 1).emit("attempt_start", command_line="x")
    EventLog(tmp_path, 2).emit("guard", step=3, name="non_finite")
    first, second = read_events(tmp_path)
    assert (first["kind"], first["attempt"], first["command_line"]) == ("attempt_start", 1, "x")
    assert (second["kind"], second["attempt"], second["step"]) == ("guard", 2, 3)
    assert first["time"] <= second["time"]


ROW = {"kind": "step", "step": 1, "attempt": 1, "time": 1.0}
NO_ROWS = [
    *({name: value for name, value in ROW.items() if name != left_out} for left_out in ROW),
    {**ROW, "step": "1"}, {**ROW, "attempt": None}, {**ROW, "time": "noon"}, {**ROW, "kind": 3}, {**ROW, "step": 1.5},
    {**ROW, "kind": "rollback", "from": "4"}, {**ROW, "kind": "rollback", "rollback": "1"},
    {**ROW, "kind": "eval", "protocol/a": "p", "eval/a": 0.5, "updates": "2"},
    {**ROW, "kind": "eval", "protocol/a": "p", "eval/a": 0.5, "baseline": "0"},
]  # fmt: skip


@pytest.mark.parametrize("row", NO_ROWS, ids=str)
def test_a_line_that_is_json_but_no_row_is_damaged(tmp_path: Path, row: dict, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path, 1)
    log.append("step", 0, {"a": 1.0})
    append_row(log.path, row)
    log.append("eval", 0, {"protocol/a": "p", "eval/a": 0.5, "updates": 1})
    assert [row["kind"] for row in read_rows(tmp_path)] == ["step", "eval"]
    assert "metrics.jsonl:2: damaged line left out" in caplog.text
    counted = view([*read_rows(tmp_path), row])
    assert list(counted.steps) == [0]
    assert [(p.name, p.accuracy) for p in counted.evaluations] == [("a", 0.5)]


def test_an_evaluation_whose_protocol_is_no_text_is_none(tmp_path: Path) -> None:
    MetricsLog(tmp_path, 1).append("eval", 0, {"protocol/a": ["p"], "eval/a": 0.5})
    assert view(read_rows(tmp_path)).evaluations == []


def test_an_event_on_a_full_disk_is_told_and_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    EventLog(tmp_path, 1).emit("save", step=3)
    assert "event save was not written: [Errno 28] No space left on device" in caplog.text
