"""Continuous batching over blocks: a finished sequence is replaced at once, a prompt is computed once a group."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from colocate_grpo.rollout.embedded_block import Block, Finished, RunningSequence
from colocate_grpo.rollout.embedded_cache import KvCache, chunks_of
from colocate_grpo.rollout.embedded_model import Decoder
from colocate_grpo.rollout.engine import Request

TILE_ROWS = (64, 32, 16)
BLOCK_TILES = 2
PREFILL_ROWS = 8
PREFILL_WIDTH = 32

Placement = tuple[Block, int, RunningSequence]


def tile_rows(slots: int) -> int:
    """Rows of a matrix product: many for large products, but two tiles or more, so that two cores have work."""
    return next((tile for tile in TILE_ROWS if slots >= 2 * tile), min(slots, TILE_ROWS[-1]))


class Batch:
    """All running and waiting requests. Shapes depend on `slots` alone, never on who is in the batch.

    `workers` decode blocks side by side, each on one thread: the products of a block are too small for several.
    Without them this thread decodes one after the other.
    """

    def __init__(self, decoder: Decoder, slots: int, workers: Executor | None = None) -> None:
        rows = decoder.tile * max(1, min(BLOCK_TILES, slots // (2 * decoder.tile)))
        self.decoder, self.workers = decoder, workers
        self.blocks = [Block(decoder, rows) for _ in range(-(-slots // rows))]
        self.slots = rows * len(self.blocks)
        self.waiting: deque[RunningSequence] = deque()
        # Prompts that fill whole tiles together.
        self._prefill_step = decoder.tile // math.gcd(decoder.tile, PREFILL_WIDTH)
        cached = -(-PREFILL_ROWS // self._prefill_step) * self._prefill_step
        self._prefill_cache = KvCache(decoder.shape, decoder.weights.embedding.dtype, cached)

    @property
    def running(self) -> int:
        return sum(len(block.sequences) for block in self.blocks)

    def __bool__(self) -> bool:
        return bool(self.waiting) or self.running > 0

    def add(self, request: Request) -> None:
        self.waiting.append(RunningSequence(request))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Fill free rows, then decode one token of every sequence; returns those that ended."""
        if self._should_admit():
            self._admit()
        elif not self.waiting:
            self._compact()
        busy = [block for block in self.blocks if block.sequences]
        run = self.workers.map if self.workers and len(busy) > 1 else map
        return [finished for ended in run(Block.step, busy) for finished in ended]

    @torch.inference_mode()
    def abort(self) -> list[Finished]:
        """End everything where it is; what waits has no tokens."""
        ended = [finished for block in self.blocks for finished in block.abort()]
        ended += [Finished(s.request, (), (), "abort") for s in self.waiting]
        self.waiting.clear()
        return ended

    @torch.inference_mode()
    def discard(self, request: Request) -> None:
        """Take one request out, wherever it is."""
        self.waiting = deque(s for s in self.waiting if s.request is not request)
        for block in self.blocks:
            block.discard(request)

    def _should_admit(self) -> bool:
        """A prefill has a fixed cost, so that a few rows are let free before they are filled together."""
        free = self.slots - self.running
        return bool(self.waiting) and free >= min(len(self.waiting), max(1, self.slots // 8))

    def _admit(self) -> None:
        placements: list[Placement] = []
        for block in self.blocks:
            for row in block.free_rows:
                if self.waiting:
                    sequence = self.waiting.popleft()
                    block.place(row, sequence)
                    placements.append((block, row, sequence))
        self._prefill(placements)
        for block in self.blocks:
            rows = [row for b, row, _ in placements if b is block]
            if rows:
                block.load(rows)

    def _prefill(self, placements: Sequence[Placement]) -> None:
        """Keys and values of every prompt but its last token, which the first decoding step takes."""
        by_prompt: dict[tuple[int, ...], list[Placement]] = {}
        for placement in placements:
            by_prompt.setdefault(placement[2].prompt[:-1], []).append(placement)
        prompts = sorted((p for p in by_prompt if p), key=len)
        for start in range(0, len(prompts), PREFILL_ROWS):
            together = prompts[start : start + PREFILL_ROWS]
            self._fill_prefill_cache(together)
            users = [(i, *placement) for i, prompt in enumerate(together) for placement in by_prompt[prompt]]
            for block in self.blocks:
                pairs = [(i, row) for i, b, row, _ in users if b is block]
                if pairs:
                    source_rows, rows = zip(*pairs, strict=True)
                    block.cache.copy_rows(self._prefill_cache, source_rows, rows, len(together[-1]))

    def _fill_prefill_cache(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Chunks of a fixed width; rows and positions without a token are computed and never read."""
        chunks = -(-len(prompts[-1]) // PREFILL_WIDTH)
        rows = -(-len(prompts) // self._prefill_step) * self._prefill_step
        ids = torch.zeros(rows, chunks * PREFILL_WIDTH, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        self._prefill_cache.reserve(ids.shape[1])
        for start in range(0, ids.shape[1], PREFILL_WIDTH):
            stop = start + PREFILL_WIDTH
            positions = torch.arange(start, stop).expand(rows, -1)
            reach = [rows] * chunks_of(stop)
            self.decoder.hidden(ids[:, start:stop], positions, self._prefill_cache, reach)

    def _compact(self) -> None:
        """Empty the least filled block when the free rows of the others can take it."""
        used = sorted((block for block in self.blocks if block.sequences), key=lambda block: len(block.sequences))
        if len(used) < 2 or sum(len(b.free_rows) for b in used[1:]) < len(used[0].sequences):
            return
        source = used[0]
        for target in used[1:]:
            rows = target.free_rows[: len(source.sequences)]
            if rows:
                target.move_from(source, list(source.sequences)[: len(rows)], rows)
