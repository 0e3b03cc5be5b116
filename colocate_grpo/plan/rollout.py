"""A model of one engine's rollout: continuous batching under a KV capacity, in discrete events.

It follows the rules of SGLang's scheduler (0.5.23, `fcfs`, page size 1): prefill before decode, admission by an
estimate of what the running requests will still need, prompts shared by a group, retraction of the youngest
requests when the next decode step does not fit. Stretches of decode steps without an event are taken at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# SGLang's constants of admission (its environment variables of the same names).
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO = 0.7 * 0.14
RATIO_DECAY = (INIT_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600
CLIP_MAX_NEW_TOKENS = 4096
RETRACT_DECODE_STEPS = 20


@dataclass(frozen=True)
class Job:
    """One sample: tokens of prompt, tokens it will generate, and its limit. Jobs of a `group` share the prompt."""

    group: int
    prompt: int
    output: int
    limit: int


@dataclass(frozen=True)
class Engine:
    """Limits of one engine, in tokens and requests."""

    kv_tokens: int
    max_running: int = 1 << 30
    chunk: int = 2048
    max_prefill: int = 16_384


@dataclass(frozen=True)
class Latency:
    """Seconds of one scheduler iteration: `prefill(tokens)`, `decode(requests, kv_tokens)`."""

    prefill: Callable[[int], float]
    decode: Callable[[int, float], float]


@dataclass
class Outcome:
    """What a rollout took. `peak_kv` counts tokens that cannot be evicted."""

    prefills: int = 0
    decodes: int = 0
    peak_kv: int = 0
    generated: int = 0
    prefilled: int = 0
    retractions: int = 0
    seconds: float = 0.0
    finished_groups: list[int] = field(default_factory=list)

    @property
    def iterations(self) -> int:
        return self.prefills + self.decodes


@dataclass(eq=False)
class _Running:
    """A request on its way: `done` tokens sampled, `filled` have KV, of which `own` are not the shared prompt."""

    job: Job
    done: int = 0
    filled: int = 0
    own: int = 0
    holds: bool = False

    @property
    def left(self) -> int:
        return self.job.output - self.done


class _Cache:
    """KV slots: prompts in use (each once a group), outputs in use, and what is cached but may be evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.cached_outputs = 0
        self.own = 0

    @property
    def used(self) -> int:
        return self.own + sum(self.prompts[g] for g, n in self.users.items() if n)

    @property
    def free(self) -> int:
        """Free or evictable."""
        return self.capacity - self.used

    def hit(self, job: Job) -> int:
        """Tokens of the prompt that are there; the last one is always computed again."""
        return min(self.prompts.get(job.group, 0), job.prompt - 1)

    def take(self, request: _Running) -> None:
        """Hold what `request.filled` says."""
        group, prompt = request.job.group, request.job.prompt
        if not request.holds:
            self.users[group] = self.users.get(group, 0) + 1
            request.holds = True
        self.prompts[group] = max(self.prompts.get(group, 0), min(request.filled, prompt))
        own = max(0, request.filled - prompt)
        self.own += own - request.own
        request.own = own

    def give_back(self, request: _Running) -> None:
        self.own -= request.own
        self.users[request.job.group] -= 1
        request.own = request.filled = 0
        request.holds = False

    def evict(self) -> None:
        """Outputs first: they are leaves of the prefix tree."""
        over = self.used + self.cached_outputs + self._idle_prompts() - self.capacity
        taken = min(max(over, 0), self.cached_outputs)
        self.cached_outputs -= taken
        over -= taken
        for group in [g for g in self.prompts if not self.users.get(g)]:
            if over <= 0:
                break
            over -= self.prompts.pop(group)

    def _idle_prompts(self) -> int:
        return sum(n for g, n in self.prompts.items() if not self.users.get(g))


class Scheduler:
    """One engine working through `jobs`; `run` gives the outcome."""

    def __init__(self, jobs: Sequence[Job], engine: Engine, latency: Latency, enough_groups: int | None = None) -> None:
        self.engine, self.latency = engine, latency
        self.waiting = deque(_Running(job) for job in jobs)
        self.running: list[_Running] = []
        self.chunked: _Running | None = None
        self.cache = _Cache(engine.kv_tokens)
        self.ratio = INIT_NEW_TOKEN_RATIO
        self.full = False
        self.outcome = Outcome()
        self.members = {g: sum(j.group == g for j in jobs) for g in {j.group for j in jobs}}
        self.enough = enough_groups if enough_groups is not None else len(self.members)

    def run(self) -> Outcome:
        """Until all groups, or `enough_groups` of them, are complete. ValueError where a job can never fit."""
        while len(self.outcome.finished_groups) < self.enough:
            batch = self._admit()
            if batch:
                self._prefill(batch)
            elif self.running:
                self._decode()
            else:
                job = self.waiting[0].job
                raise ValueError(f"a job of {job.prompt} + {job.limit} tokens does not fit {self.engine.kv_tokens}")
            self._note_peak()
        return self.outcome

    # -- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> list[tuple[_Running, int]]:
        """(request, tokens to compute) of the next prefill batch; empty when there is none."""
        if not self.running:
            self.full = False
        if (self.full or not self.waiting) and self.chunked is None:
            return []
        budget = _Budget(self)
        if self.chunked is not None:
            budget.continue_chunk(self.chunked)
        while self.waiting and budget.open:
            if len(self.running) + len(budget.batch) >= self.engine.max_running:
                self.full = True
                break
            if not budget.add(self.waiting[0]):
                self.full = bool(self.running or budget.batch)
                break
            self.waiting.popleft()
            if budget.exhausted:
                self.full = True
                break
        return budget.batch

    def _prefill(self, batch: list[tuple[_Running, int]]) -> None:
        tokens = sum(count for _, count in batch)
        self.outcome.prefills += 1
        self.outcome.prefilled += tokens
        self.outcome.seconds += self.latency.prefill(tokens)
        was_empty, self.chunked = not self.running, None
        for request, count in batch:
            self._hold(request, count)
        # SGLang forgets that it is full when the prefilled batch becomes the running one, or loses its last chunk.
        if was_empty or self.chunked:
            self.full = False
        self.cache.evict()
        self._finish()

    def _hold(self, request: _Running, count: int) -> None:
        """Give a request the KV of `count` computed tokens; a prompt, or its part, is kept once a group."""
        job = request.job
        request.filled += count
        self.cache.take(request)
        if request.filled < job.prompt + request.done:
            self.chunked = request
            return
        request.done += 1
        self.outcome.generated += 1
        self.running.append(request)

    # -- decode -----------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """All decode steps up to the next event: a request finishes, or the next step would not fit."""
        if self.cache.free < len(self.running):
            self._retract()
        else:
            self.ratio = max(self.ratio - RATIO_DECAY, MIN_NEW_TOKEN_RATIO)
        count = len(self.running)
        steps = max(1, min(min(r.left for r in self.running), self.cache.free // count))
        self.ratio = max(self.ratio - RATIO_DECAY * (steps - 1), MIN_NEW_TOKEN_RATIO)
        mean_kv = self.cache.used + count * (steps + 1) / 2
        self.outcome.decodes += steps
        self.outcome.seconds += steps * self.latency.decode(count, mean_kv)
        for request in self.running:
            request.done += steps
            request.filled += steps
            self.cache.take(request)
        self.outcome.generated += steps * count
        self._note_peak()
        self.cache.evict()
        self._finish()

    def _retract(self) -> None:
        """Give up the youngest requests until the next step fits; they wait at the end of the queue."""
        self.running.sort(key=lambda r: (r.done, -r.job.prompt), reverse=True)
        while len(self.running) > 1:
            request = self.running.pop()
            self.cache.give_back(request)
            self.waiting.append(request)
            self.outcome.retractions += 1
            if self.cache.free >= len(self.running):
                break
        self.full = False
        decoded = sum(r.done for r in self.running) + RETRACT_DECODE_STEPS * len(self.running)
        self.ratio = min(1.0, decoded / (sum(r.job.limit for r in self.running) + 1))

    def _finish(self) -> None:
        done = [r for r in self.running if r.left <= 0]
        if not done:
            return
        self.running = [r for r in self.running if r.left > 0]
        self.full = False
        for request in done:
            self.cache.cached_outputs += request.own
            self.cache.give_back(request)
            self.members[request.job.group] -= 1
            if self.members[request.job.group] == 0:
                self.outcome.finished_groups.append(request.job.group)
        self.cache.evict()

    def _note_peak(self) -> None:
        used = self.cache.used
        assert used <= self.engine.kv_tokens, f"{used} tokens in a cache of {self.engine.kv_tokens}"
        self.outcome.peak_kv = max(self.outcome.peak_kv, used)


class _Budget:
    """What one prefill pass may still take: KV with room for the running requests' future, and tokens to compute."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch: list[tuple[_Running, int]] = []
        self.chunk = scheduler.engine.chunk
        self.input = scheduler.engine.max_prefill
        self.promised = sum(min(r.job.limit - r.done, CLIP_MAX_NEW_TOKENS) for r in scheduler.running) * scheduler.ratio

    @property
    def remaining(self) -> float:
        return self.scheduler.cache.free - self.promised

    @property
    def open(self) -> bool:
        return self.chunk > 0 and self.input > 0

    @property
    def exhausted(self) -> bool:
        return self.remaining <= 0

    def add(self, request: _Running) -> bool:
        """Admit a waiting request, whole or its first chunk; False where the KV it may need is not there."""
        job, cache = request.job, self.scheduler.cache
        hit = cache.hit(job)
        extend = job.prompt + request.done - hit
        future = min(max(job.limit - request.done, 0), CLIP_MAX_NEW_TOKENS)
        # A prefix that only lies in the cache stops being evictable once this request uses it.
        pinned = hit if not cache.users.get(job.group) else 0
        if extend + future + 1 >= self.remaining - pinned:
            return False
        self.promised += pinned if not any(r.job.group == job.group for r, _ in self.batch) else 0
        request.filled = hit
        self._take(request, extend, min(job.limit, CLIP_MAX_NEW_TOKENS))
        return True

    def continue_chunk(self, request: _Running) -> None:
        left = request.job.prompt + request.done - request.filled
        self._take(request, left, min(request.job.limit, CLIP_MAX_NEW_TOKENS))

    def _take(self, request: _Running, extend: int, future: int) -> None:
        tokens = min(extend, self.chunk)
        self.batch.append((request, tokens))
        self.promised += tokens + 1 + (future if tokens == extend else 0)
        self.chunk -= tokens
        self.input -= tokens
