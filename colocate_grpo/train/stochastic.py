"""AdamW for small cards: bf16 weights and moments with stochastic rounding, no fp32 master; 8 bytes a parameter.

Arithmetic is in fp32; only what is stored is rounded, up or down with the probability that keeps its mean. Rounded
to the nearest instead, a bf16 weight ignores every update below 1/256 of it, and a second moment never decays.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from colocate_grpo.config import Config
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.schedule import StepOutcome

CHUNK = 2**22
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Piece:
    """The part of one parameter that this DP rank owns: `owned` in the flat shard, from `offset` in the parameter."""

    name: str
    param: torch.nn.Parameter
    key: int
    offset: int
    owned: slice
    decays: bool
    counts: bool

    @property
    def size(self) -> int:
        return self.owned.stop - self.owned.start


def mix(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """64 pseudo-random bits for each counter start..start+count under `key` (SplitMix64, Steele et al. 2014)."""
    x = torch.arange(start, start + count, device=device) * _signed(0x9E3779B97F4A7C15) + key
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def round_stochastic(values: Tensor, random16: Tensor) -> Tensor:
    """fp32 -> bf16, up with probability (distance to the lower neighbour) / (spacing); `random16` in 0..65535."""
    bits = values.view(torch.int32) + random16.to(torch.int32)
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


class StochasticAdamW:
    """AdamW over DDP's flat bf16 buffers; moments are sharded over DP like the gradients."""

    def __init__(self, config: Config, ddp: DistributedDataParallel, parallel: Parallel) -> None:
        self.config, self.seed = config.train.optimizer, config.run.seed
        self.ddp, self.parallel = ddp, parallel
        (buffer,) = ddp.buffers
        (self.bucket,) = buffer.buckets
        self.steps = 0
        self.pieces = list(self._find_pieces(buffer.param_index_map))
        self.moments = {name: torch.zeros_like(self._mine(self.bucket.param_data)) for name in MOMENTS}

    def step(self, lr: float) -> StepOutcome:
        norm = self._grad_norm()
        if not math.isfinite(norm):
            return StepOutcome(False, norm)
        self.steps += 1
        limit = self.config.grad_clip
        scale = limit / (norm + 1e-6) if 0 < limit < norm else 1.0
        for piece in self.pieces:
            for start in range(0, piece.size, CHUNK):
                self._update(piece, start, min(CHUNK, piece.size - start), lr, scale)
        self.ddp.start_param_sync()
        return StepOutcome(True, norm)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.moments.values()

    def sharded_state_dict(self, model_state: dict[str, Any], loading: bool) -> Any:
        """Moments in the shapes of the parameters, gathered over DP on the host."""
        by_param = {id(entry.data): entry for entry in _entries(model_state)}
        state: dict[str, Any] = {"steps": self.steps}
        for moment, shard in self.moments.items():
            flat = self._gathered(shard)
            for param, (start, stop, _) in self.ddp.buffers[0].param_index_map.items():
                state[f"{moment}.{self._names[param]}"] = _like(
                    by_param[id(param)], f"optimizer.state.{moment}", flat[start:stop].view(param.shape)
                )
        return state

    def load(self, state: Any, read: Callable[[Any], Any]) -> None:
        state = read(state)
        self.steps = state["steps"]
        for piece in self.pieces:
            for moment, shard in self.moments.items():
                full = state[f"{moment}.{piece.name}"].flatten()
                shard[piece.owned].copy_(full[piece.offset : piece.offset + piece.size])

    def _find_pieces(self, ranges: dict[torch.nn.Parameter, tuple[int, int, int]]) -> Iterator[Piece]:
        self._names = {param: name for name, param in self.ddp.module.named_parameters()}
        size = self.bucket.param_data.numel() // self.parallel.dp
        begin = size * self.parallel.dp_rank
        for param, (start, stop, _) in ranges.items():
            low, high = max(start, begin), min(stop, begin + size)
            if low >= high:
                continue
            sharded = bool(getattr(param, "tensor_model_parallel", False))
            name = self._names[param]
            # Copies of one parameter draw the same numbers on every TP rank; shards draw different ones.
            key = zlib.crc32(f"{name} {self.parallel.tp_rank if sharded else 0}".encode())
            counts = sharded or self.parallel.tp_rank == 0
            yield Piece(name, param, key, low - start, slice(low - begin, high - begin), param.dim() > 1, counts)

    def _mine(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.parallel.dp, -1)[self.parallel.dp_rank]

    def _grad_norm(self) -> float:
        grads = self._mine(self.bucket.grad_data)
        squares = [grads[p.owned].float().square().sum() for p in self.pieces if p.counts]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=grads.device)
        dist.all_reduce(total)
        return math.sqrt(total.item()) if total.isfinite() else float(total)

    @torch.no_grad()
    def _update(self, piece: Piece, start: int, count: int, lr: float, scale: float) -> None:
        """One AdamW update of `count` elements from `start` of a piece (Loshchilov & Hutter, arXiv 1711.05101)."""
        where = slice(piece.owned.start + start, piece.owned.start + start + count)
        param, grad = self._mine(self.bucket.param_data)[where], self._mine(self.bucket.grad_data)[where]
        first, second = (self.moments[name][where] for name in MOMENTS)
        beta1, beta2 = self.config.betas
        g = grad.float() * scale
        m = first.float().mul_(beta1).add_(g, alpha=1 - beta1)
        v = second.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / (1 - beta2**self.steps)).sqrt_().add_(self.config.eps)
        decay = lr * self.config.weight_decay if piece.decays else 0.0
        p = param.float().mul_(1 - decay).addcdiv_(m, denominator, value=-lr / (1 - beta1**self.steps))
        bits = mix(self._key(piece), piece.offset + start, count, param.device)
        for target, values, shift in ((param, p, 0), (first, m, 16), (second, v, 32)):
            target.copy_(round_stochastic(values, (bits >> shift) & 0xFFFF))

    def _key(self, piece: Piece) -> int:
        mixed = (self.seed * 0x9E3779B97F4A7C15 + self.steps) * 0xD1342543DE82EF95 + piece.key * 0x2545F4914F6CDD1D
        return _signed(mixed % 2**64)

    def _gathered(self, shard: Tensor) -> Tensor:
        full = torch.empty_like(self.bucket.param_data)
        dist.all_gather_into_tensor(full, shard, group=self.parallel.dp_group)
        return full.cpu()


def _entries(state: Any) -> Iterator[Any]:
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        if hasattr(value, "replica_id"):
            yield value
        else:
            yield from _entries(value)


def _like(entry: Any, prefix: str, data: Tensor) -> Any:
    """The sharding of a parameter for another tensor of its shape."""
    changes: dict[str, Any] = {"key": f"{prefix}.{entry.key}", "data": data}
    return replace(entry, **changes if isinstance(entry, ShardedTensorFactory) else changes | {"dtype": data.dtype})
