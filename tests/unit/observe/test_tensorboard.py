"""TensorBoard's own reader sees each step once, whatever happened to the run."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from colocate_grpo.observe.metrics import MetricsLog, read_rows, view
from colocate_grpo.observe.tensorboard import TensorBoardLog, rebuild

Points = dict[str, list[tuple[int, float]]]


def _points(run_dir: Path) -> Points:
    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def _train(run_dir: Path, attempt: int, kept: int | None, until: int) -> None:
    """One attempt that goes on after step `kept` and evaluates after every odd step."""
    log = MetricsLog(run_dir, attempt)
    if kept is not None:
        log.append("attempt", kept, {})
    mirror = TensorBoardLog(run_dir, kept_step=kept)
    if kept is None:
        for repeat in range(2):
            values = {"eval/a": 0.1 + repeat, "protocol/a": "p", "baseline": repeat, "updates": 0}
            mirror.add(log.append("eval", 0, values))
    for step in range((kept if kept is not None else -1) + 1, until):
        mirror.add(log.append("step", step, {"train/loss": step + attempt / 10}))
        if step % 2:
            values = {"eval/a": step + attempt / 10, "protocol/a": "p", "updates": step + 1}
            mirror.add(log.append("eval", step, values))
    mirror.close()


def test_resumes_leave_no_overlap_and_lose_no_evaluation(tmp_path: Path) -> None:
    _train(tmp_path, 1, None, 8)
    _train(tmp_path, 2, 3, 6)
    _train(tmp_path, 3, 1, 4)
    expected = {
        "train/loss": [(0, 0.1), (1, 1.1), (2, 2.3), (3, 3.3)],
        # The evaluation after step 1 lies at 2 updates, beyond the purge, and is still there.
        "eval/a": [(0, 0.1), (2, 1.1), (4, 3.3)],
        "eval_baseline/a": [(0, 0.1), (1, 1.1)],
    }
    assert _points(tmp_path) == expected
    rebuild(tmp_path)
    assert _points(tmp_path) == expected


def test_two_protocols_are_two_curves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 1)
    for step, protocol in [(1, "pppppppp1"), (3, "qqqqqqqq1"), (5, "qqqqqqqq1")]:
        log.append("eval", step, {"eval/a": 0.1 * step, "protocol/a": protocol})
    rebuild(tmp_path)
    assert _points(tmp_path) == {"eval/a": [(2, 0.1)], "eval/a@qqqqqqqq": [(4, 0.3), (6, 0.5)]}


def test_rebuilding_takes_what_counts(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 1)
    for step in range(4):
        log.append("step", step, {"train/loss": step, "note": "text is no curve"})
    log.append("rollback", 1, {"from": 3, "rollback": 1, "reason": "r"})
    rebuild(tmp_path)
    assert _points(tmp_path) == {"train/loss": [(step, float(step)) for step in view(read_rows(tmp_path)).steps]}
