"""What is measured of a batch of trajectories, by the field's metric names."""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence

from colocate_grpo.trajectory import Trajectory

# A tail that compresses better than this is a loop of a few phrases, not an argument.
_DEGENERATE_RATIO = 10.0
_TAIL_CHARS = 10_000


def is_repetitive(text: str) -> bool:
    """True where the last 10,000 characters compress better than 10 : 1."""
    tail = text[-_TAIL_CHARS:].encode("utf-8", "replace")
    return len(tail) > _DEGENERATE_RATIO * len(zlib.compress(tail))


def share(flags: Sequence[bool]) -> float:
    """Share of True; 0.0 for an empty sequence."""
    return sum(flags) / len(flags) if flags else 0.0


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of independent values; nan for fewer than two.

    Samples of one problem depend on each other: of samples, give the means of their problems.
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def clustered_error(name: str, cluster_means: Sequence[float]) -> dict[str, float]:
    """`NAME/stderr`, the standard error over clusters; nothing where one cluster says nothing about others."""
    return {f"{name}/stderr": standard_error(cluster_means)} if len(cluster_means) > 1 else {}


def length_metrics(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """`PREFIX/response_len/{mean,median,max}` in tokens, truncation and repetition shares."""
    lengths = [t.response_length for t in trajectories] or [0]
    return {
        f"{prefix}/response_len/mean": statistics.fmean(lengths),
        f"{prefix}/response_len/median": float(statistics.median(lengths)),
        f"{prefix}/response_len/max": float(max(lengths)),
        f"{prefix}/truncated_ratio": share([t.status == "truncated" for t in trajectories]),
        f"{prefix}/repetition_frac": share([bool(t.metadata.get("repetitive")) for t in trajectories]),
    }


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of one training batch; failed members count as failures and nowhere else."""
    alive = [t for t in trajectories if t.status != "failed"]
    scores = [t.score for t in alive if t.score is not None]
    groups = [[t.score for t in group if t.score is not None] for group in group_by_id(alive)]
    reasons = Counter(t.verdict.reason for t in alive if t.verdict)
    return {
        "rollout/raw_reward": statistics.fmean(scores) if scores else 0.0,
        **clustered_error("rollout/raw_reward", [statistics.fmean(group) for group in groups if group]),
        "rollout/failed_ratio": share([t.status == "failed" for t in trajectories]),
        "rollout/zero_variance_ratio": share([not has_variance(g) for g in group_by_id(alive)]),
        **{f"rollout/reason/{reason}": float(count) for reason, count in sorted(reasons.items())},
        **length_metrics(alive, "rollout"),
    }


def group_by_id(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Groups in order of first appearance."""
    groups: dict[int, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, []).append(t)
    return list(groups.values())


def has_variance(group: Sequence[Trajectory]) -> bool:
    """True where the surviving members' scores differ, so that the group carries a signal."""
    return len({t.score for t in group if t.score is not None}) > 1
