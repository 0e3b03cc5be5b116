"""A block: a fixed number of rows, each at most one running sequence, decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colocate_grpo.rollout.embedded_cache import CHUNK, KvCache, chunks_of
from colocate_grpo.rollout.embedded_model import Decoder
from colocate_grpo.rollout.embedded_sampling import SamplingRows, noise, sample
from colocate_grpo.rollout.engine import FinishReason, Request

INTEGERS = ("token", "position", "count", "limit", "replay", "alive", "top_k")
FLOATS = ("temperature", "top_p", "min_p")
# Rows are put in order when attention over chunks that nobody needed has cost as much as that: so many chunks.
ORDERING_COST = 128


@dataclass(frozen=True)
class Finished:
    """The sampled part of a sequence that ended."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason


@dataclass(eq=False)
class RunningSequence:
    """A request on its way. A partial answer is not prefilled but decoded again, so that its keys and values, and
    with them all that follows, are those of a sequence that was never interrupted."""

    request: Request
    prompt: tuple[int, ...] = field(init=False)
    partial: tuple[int, ...] = field(init=False)
    horizon: int = 0

    def __post_init__(self) -> None:
        ids, cut = self.request.token_ids, len(self.request.token_ids) - self.request.sampled
        self.prompt, self.partial = ids[:cut], ids[cut:]

    @property
    def limit(self) -> int:
        """Longest answer, the partial one included."""
        return len(self.partial) + self.request.sampling.max_new_tokens


class Block:
    """State of the rows in tensors; a step costs the host one small synchronisation."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.decoder, self.rows = decoder, rows
        weights, shape = decoder.weights, decoder.shape
        self.cache = KvCache(shape, weights.embedding.dtype, rows)
        self.sequences: dict[int, RunningSequence] = {}
        self._integers = torch.zeros(len(INTEGERS), rows, dtype=torch.int64)
        self._floats = torch.ones(len(FLOATS), rows)
        self._stops = torch.full((rows, 1), -1)
        self._history = torch.zeros(rows, 0, dtype=torch.int64)
        self._logprobs = torch.zeros(rows, 0)
        self._noise = torch.zeros(rows, 0, dtype=torch.float64)
        self._steps = 0
        self._replay_until = 0
        self._horizon = 0
        self._needless = 0
        self._filters = self._greedy = False

    @property
    def free_rows(self) -> list[int]:
        return [row for row in range(self.rows) if row not in self.sequences]

    def place(self, row: int, sequence: RunningSequence) -> None:
        """Reserve a row; `load` fills it."""
        assert row not in self.sequences
        self.sequences[row] = sequence
        sequence.horizon = len(sequence.prompt) - self._steps

    def load(self, rows: Sequence[int]) -> None:
        """Write the state of freshly placed rows, whose prompts but the last token are in the cache."""
        placed = [self.sequences[row] for row in rows]
        width = max(s.limit for s in placed)
        self._widen(width, max(len(s.request.sampling.stop_token_ids) for s in placed))
        vocab = self.decoder.shape.vocab
        self._integers[:, rows] = torch.tensor([_integers(s, vocab) for s in placed]).T
        self._floats[:, rows] = torch.tensor([_floats(s) for s in placed]).T
        stops = [s.request.sampling.stop_token_ids for s in placed]
        self._stops[rows] = torch.tensor(_padded(stops, self._stops.shape[1], -1), dtype=torch.int64)
        longest = max(len(s.partial) for s in placed)
        self._history[rows, :longest] = torch.tensor(
            _padded([s.partial for s in placed], longest, 0), dtype=torch.int64
        )
        for row, sequence in zip(rows, placed, strict=True):
            self._noise[row, : sequence.limit] = torch.from_numpy(noise(sequence.request.seed, sequence.limit))
        self._replay_until = max(self._replay_until, self._steps + max(len(s.partial) for s in placed))
        self._summarise()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Decode one token of every row; returns the sequences that ended with it. On any thread."""
        self.cache.reserve(self._steps + self._horizon)
        reach = self._reach()
        rows = -(-reach[0] // self.decoder.tile) * self.decoder.tile
        token, position, count, limit, replay, alive, _ = self._integers[:, :rows]
        history, logprobs, uniform = (table[:rows] for table in self._tables())
        hidden = self.decoder.hidden(token.unsqueeze(1), position.unsqueeze(1), self.cache, reach)
        place = count.unsqueeze(1)
        tokens, logs = sample(self.decoder.logits(hidden), uniform.gather(1, place).squeeze(1), self._sampling(rows))
        if self._steps < self._replay_until:
            tokens = torch.where(count < replay, history.gather(1, place).squeeze(1), tokens)
        history.scatter_(1, place, tokens.unsqueeze(1))
        logprobs.scatter_(1, place, logs.unsqueeze(1))
        token.copy_(tokens)
        position += alive
        count += alive
        self._steps += 1
        ended = (count >= limit) | (tokens.unsqueeze(1) == self._stops[:rows]).any(1)
        ended &= (alive != 0) & (count > replay)
        return self._retire(ended.nonzero().flatten().tolist())

    def abort(self) -> list[Finished]:
        """End every sequence where it is."""
        rows = list(self.sequences)
        return [Finished(f.request, f.token_ids, f.logprobs, "abort") for f in self._retire(rows)]

    def discard(self, request: Request) -> None:
        """Free the row of a request that nobody waits for any more."""
        self._retire([row for row, s in self.sequences.items() if s.request is request])

    def move_from(self, source: Block, source_rows: list[int], rows: list[int]) -> None:
        """Take over running sequences from another block; their bits do not change."""
        self._widen(source._history.shape[1], source._stops.shape[1])
        moved = [source.sequences.pop(row) for row in source_rows]
        # The next token has no place yet in a cache that is full to the end of a chunk.
        length = min(source._steps + max(s.horizon for s in moved), source.cache.chunks * CHUNK)
        self.cache.copy_rows(source.cache, source_rows, rows, length)
        self._copy_state(source, source_rows, rows)
        for row, sequence in zip(rows, moved, strict=True):
            self.sequences[row] = sequence
            sequence.horizon += source._steps - self._steps
        self._replay_until = max(self._replay_until, self._steps + source._replay_until - source._steps)
        source._clear(source_rows)
        self._summarise()

    def _copy_state(self, source: Block, source_rows: list[int], rows: list[int]) -> None:
        """All but the cache. This block's tables are as wide as the source's, or wider."""
        width, stops = source._history.shape[1], source._stops.shape[1]
        for mine, theirs in ((self._integers, source._integers), (self._floats, source._floats)):
            mine[:, rows] = theirs[:, source_rows]
        for mine, theirs in zip(self._tables(), source._tables(), strict=True):
            mine[rows, :width] = theirs[source_rows]
        self._stops[rows, :stops] = source._stops[source_rows]
        self._stops[rows, stops:] = -1

    def _retire(self, rows: list[int]) -> list[Finished]:
        if not rows:
            return []
        counts = self._integers[INTEGERS.index("count"), rows].tolist()
        history, logprobs = self._history[rows].tolist(), self._logprobs[rows].tolist()
        finished = []
        for row, count, ids, logs in zip(rows, counts, history, logprobs, strict=True):
            sequence = self.sequences.pop(row)
            start = len(sequence.partial)
            new = tuple(ids[start:count])
            reason: FinishReason = "stop" if new and new[-1] in sequence.request.sampling.stop_token_ids else "length"
            finished.append(Finished(sequence.request, new, tuple(logs[start:count]), reason))
        self._clear(rows)
        return finished

    def _clear(self, rows: list[int]) -> None:
        self._integers[:, rows] = 0
        self._floats[:, rows] = 1.0
        self._summarise()

    def _summarise(self) -> None:
        """What a step needs to know of all its sequences together; they change less often than there are steps."""
        used = [s.request.sampling for s in self.sequences.values()]
        self._horizon = max((s.horizon for s in self.sequences.values()), default=0)
        self._filters = any(s.top_p < 1 or s.top_k > 0 or s.min_p > 0 for s in used)
        self._greedy = any(s.temperature == 0 for s in used)

    def _sampling(self, rows: int) -> SamplingRows:
        temperature, top_p, min_p = self._floats[:, :rows]
        top_k = self._integers[INTEGERS.index("top_k"), :rows]
        return SamplingRows(temperature, top_p, top_k, min_p, self._filters, self._greedy)

    def _reach(self) -> list[int]:
        """For each chunk of the cache, how many first rows attention takes: all that have tokens in the chunk are
        among them. Rows are put in order, the longest first, when many without tokens are."""
        chunks = [0] * self.rows
        for row, sequence in self.sequences.items():
            chunks[row] = chunks_of(self._steps + sequence.horizon)
        reach = _last_rows(chunks)
        self._needless += sum(reach) - sum(chunks)
        if self._needless >= ORDERING_COST:
            self._needless = 0
            self._reorder(chunks)
            reach = _last_rows(sorted(chunks, reverse=True))
        return reach

    def _reorder(self, chunks: Sequence[int]) -> None:
        """Bring the rows with the most chunks to the front; a row whose place is right stays."""
        in_order = sorted(chunks, reverse=True)
        wrong = [row for row in range(self.rows) if chunks[row] != in_order[row]]
        sources = sorted(wrong, key=chunks.__getitem__, reverse=True)
        running = sum(chunks[row] > 0 for row in wrong)  # they come first, free rows after them
        if not running:
            return
        self.cache.copy_rows(self.cache, sources[:running], wrong[:running], chunks[sources[0]] * CHUNK)
        self._copy_state(self, sources, wrong)
        self.sequences |= {
            row: self.sequences.pop(source) for source, row in zip(sources[:running], wrong, strict=False)
        }

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._history, self._logprobs, self._noise

    def _widen(self, answer: int, stops: int) -> None:
        pad = torch.nn.functional.pad
        extra = answer - self._history.shape[1]
        if extra > 0:
            self._history, self._logprobs, self._noise = (pad(table, (0, extra)) for table in self._tables())
        if stops > self._stops.shape[1]:
            self._stops = pad(self._stops, (0, stops - self._stops.shape[1]), value=-1)


def _last_rows(chunks: Sequence[int]) -> list[int]:
    """For each chunk, the number of rows up to the last one that has it."""
    return [max(row for row, has in enumerate(chunks) if has > i) + 1 for i in range(max(chunks))]


def _padded(lists: Sequence[tuple[int, ...]], width: int, fill: int) -> list[list[int]]:
    return [[*values, *[fill] * (width - len(values))] for values in lists]


def _integers(s: RunningSequence, vocab: int) -> list[int]:
    """Column of INTEGERS: the last token of the prompt is the first input of the decoding."""
    top_k = s.request.sampling.top_k
    return [s.prompt[-1], len(s.prompt) - 1, 0, s.limit, len(s.partial), 1, top_k if top_k > 0 else vocab]


def _floats(s: RunningSequence) -> list[float]:
    sampling = s.request.sampling
    return [sampling.temperature, sampling.top_p, sampling.min_p]
