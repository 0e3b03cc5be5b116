"""From trajectories to the samples of a training step, and from samples to packed micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colocate_grpo.algorithm.advantage import advantages
from colocate_grpo.algorithm.loss import Denominators
from colocate_grpo.config import Config
from colocate_grpo.train.attention import Segments
from colocate_grpo.trajectory import Trajectory


@dataclass
class Sample:
    """What training needs of a trajectory. `rows` are the positions that predict the sampled tokens `targets`.

    token_ids [t]; rows, targets, rollout_logprobs [m]; old_logprobs and reference_logprobs [m] once computed.
    `index` is the trajectory's place in the batch.
    """

    index: int
    group: int
    token_ids: np.ndarray
    rows: np.ndarray
    rollout_logprobs: np.ndarray
    advantage: float
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def targets(self) -> np.ndarray:
        return self.token_ids[self.rows + 1]


def make_samples(batch: Sequence[Trajectory], config: Config) -> list[Sample]:
    """The samples that count in the loss, with advantages from the whole batch.

    Left out: trajectories without a score, without a sampled token, and, under `overlong_filter`, truncated
    ones (these still count in their group's statistics).
    """
    values = advantages(config.algorithm.advantage, [t.score for t in batch], [t.group_id for t in batch])
    return [
        make_sample(trajectory, index, value)
        for index, (trajectory, value) in enumerate(zip(batch, values, strict=True))
        if trajectory.score is not None
        and trajectory.response_length
        and not (config.rollout.overlong_filter and trajectory.status == "truncated")
    ]


def make_sample(trajectory: Trajectory, index: int, advantage: float) -> Sample:
    mask = np.asarray(trajectory.loss_mask, dtype=bool)
    assert not mask[0], "the first token of a trajectory cannot have been sampled"
    positions = np.flatnonzero(mask)
    return Sample(
        index=index,
        group=trajectory.group_id,
        token_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
        rows=positions - 1,
        rollout_logprobs=np.asarray(trajectory.rollout_logprobs, dtype=np.float32)[positions],
        advantage=advantage,
    )


def denominators(samples: Sequence[Sample], config: Config) -> Denominators:
    """Sizes of one optimizer step's global batch."""
    return Denominators(sum(len(s.rows) for s in samples), len(samples), config.rollout.max_new_tokens)


def split_updates(samples: Sequence[Sample], updates: int) -> list[list[Sample]]:
    """Whole groups, in batch order, dealt into `updates` mini-batches of nearly equal numbers of groups."""
    groups = list(dict.fromkeys(s.group for s in samples))
    bounds = [round(len(groups) * u / updates) for u in range(updates + 1)]
    places = {group: place for place, group in enumerate(groups)}
    return [[s for s in samples if a <= places[s.group] < b] for a, b in itertools.pairwise(bounds)]


@dataclass
class MicroBatch:
    """Packed samples on the device. tokens [t] (t a multiple of TP); the others [m], one a sampled token.

    `weight` is the aggregation's; `sequence` numbers the samples of this micro-batch.
    """

    samples: list[Sample]
    tokens: Tensor
    segments: Segments
    rows: Tensor
    targets: Tensor
    advantage: Tensor
    weight: Tensor
    sequence: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None

    @classmethod
    def of(
        cls, samples: list[Sample], sizes: Denominators, aggregation: str, tp: int, device: torch.device
    ) -> MicroBatch:
        lengths = [s.length for s in samples]
        counts = torch.tensor([len(s.rows) for s in samples])
        starts = np.cumsum([0, *lengths[:-1]])
        rows = [s.rows + start for s, start in zip(samples, starts, strict=True)]
        padding = -sum(lengths) % tp  # a segment of its own: nothing attends to it
        tokens = np.concatenate([*(s.token_ids for s in samples), np.zeros(padding, dtype=np.int64)])

        def per_token(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts).to(device)

        return cls(
            samples=samples,
            tokens=torch.from_numpy(tokens).to(device),
            segments=Segments.of(lengths + [padding] * (padding > 0), device),
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            targets=torch.from_numpy(np.concatenate([s.targets for s in samples])).to(device),
            advantage=per_token([s.advantage for s in samples]),
            weight=per_token([sizes.token_weight(aggregation, len(s.rows)) for s in samples]),
            sequence=torch.arange(len(samples)).repeat_interleave(counts).to(device),
            rollout_logprobs=_joined([s.rollout_logprobs for s in samples], device),
            old_logprobs=_optional([s.old_logprobs for s in samples], device),
            reference_logprobs=_optional([s.reference_logprobs for s in samples], device),
        )

    def split(self, values: Tensor) -> list[np.ndarray]:
        """[m] values by sample, on the host."""
        counts = [len(s.rows) for s in self.samples]
        return [part.numpy() for part in values.detach().cpu().split(counts)]


def _joined(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)


def _optional(arrays: list[np.ndarray | None], device: torch.device) -> Tensor | None:
    present = [a for a in arrays if a is not None]
    assert len(present) in (0, len(arrays))
    return _joined(present, device) if present else None
