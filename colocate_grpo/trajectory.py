"""The one record that flows through the system: a prompt, what was sampled for it, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import zstandard
from pydantic import TypeAdapter

from colocate_grpo.errors import DataError

Status = Literal["completed", "truncated", "aborted", "failed"]


@dataclass(frozen=True)
class Verdict:
    """What the reward says of one response. `score` None: excluded, never trained on as a zero.

    `accuracy` is what an evaluation counts, where that is not the score: a shaped score has a length penalty in it.
    """

    score: float | None
    reason: str
    detail: str = ""
    accuracy: float | None = None


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start <= i < end` (indices into `Trajectory.token_ids`) were sampled by weights `version`."""

    start: int
    end: int
    version: int


@dataclass
class Trajectory:
    """One sampled response.

    `token_ids` is prompt + response exactly as the engine saw and sampled it, final EOS included.
    `loss_mask` and `rollout_logprobs` have the same length; the mask is 1 on sampled tokens only and the
    log-prob is 0.0 elsewhere. `failed` means that the infrastructure failed: such a trajectory has no
    score and is left out of its group.
    """

    prompt_id: str
    group_id: int
    sample_index: int
    seed: int
    token_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float]
    weight_versions: list[VersionSpan]
    status: Status
    verdict: Verdict | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask) == len(self.rollout_logprobs)

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    @property
    def score(self) -> float | None:
        """The reward, or None where the trajectory is excluded from its group."""
        if self.status == "failed" or self.verdict is None:
            return None
        return self.verdict.score

    @property
    def accuracy(self) -> float | None:
        """The score without its shaping, or None where the trajectory is excluded."""
        shaped = self.score
        unshaped = self.verdict.accuracy if self.verdict else None
        return shaped if shaped is None or unshaped is None else unshaped

    def to_json(self) -> dict[str, Any]:
        verdict = vars(self.verdict) if self.verdict else None
        return {**vars(self), "verdict": verdict, "weight_versions": [vars(span) for span in self.weight_versions]}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trajectory:
        verdict = Verdict(**row["verdict"]) if row["verdict"] else None
        spans = [VersionSpan(**span) for span in row["weight_versions"]]
        return cls(**{**row, "verdict": verdict, "weight_versions": spans})


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a jsonl.zst dump; the file appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    lines = "".join(json.dumps(t.to_json()) + "\n" for t in trajectories)
    partial.write_bytes(zstandard.compress(lines.encode()))
    partial.replace(path)


_LINE = TypeAdapter(Trajectory)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Read a dump made by `write_trajectories`. Raises DataError where it is none, or not a whole one."""
    packed = path.read_bytes()
    try:
        # A flipped bit in its header makes a frame claim any size.
        for line in zstandard.decompress(packed).splitlines():
            yield _LINE.validate_json(line)
    except (zstandard.ZstdError, ValueError, AssertionError, MemoryError) as error:
        raise DataError(f"{path}: a damaged dump of rollouts ({str(error).splitlines()[0]})") from None
