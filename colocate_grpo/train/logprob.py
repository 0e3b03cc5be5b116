"""Log-prob and entropy of given tokens straight from hidden states, chunk by chunk: full logits never exist.

Memory is O(chunk x vocabulary / TP). The backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """How the vocabulary and the sequence are split over the TP group.

    `vocab` is the real vocabulary: columns behind it are padding and have probability 0.
    """

    group: dist.ProcessGroup
    vocab: int
    sequence_parallel: bool
    chunk: int
    temperature: float

    @property
    def tp(self) -> int:
        return self.group.size()

    def real_columns(self, size: int) -> int:
        """How many of this rank's `size` columns are real vocabulary; the rest is padding."""
        return max(0, min(size, self.vocab - self.group.rank() * size))


def token_logprobs(
    hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets[i]` after token `rows[i]`, and the entropy there, at `shard.temperature`.

    hidden [t, h] (sequence parallel: this rank's [t / tp, h]); weight [padded vocabulary / tp, h];
    rows, targets [m] index the whole sequence and vocabulary -> two fp32 tensors [m].
    A weight with Megatron's `main_grad` gets its gradient added there in fp32.
    """
    return _TokenLogProbs.apply(hidden, weight, rows, targets, shard)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        full = _gather_sequence(hidden, shard)
        logprob = torch.empty(rows.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, logsumexp = torch.empty_like(logprob), torch.empty_like(logprob)
        for part in _chunks(rows.shape[0], shard.chunk):
            logits = _scaled_logits(full.index_select(0, rows[part]), weight, shard)
            logprob[part], entropy[part], logsumexp[part] = _statistics(logits, targets[part], shard)
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing on the way back
        ctx.save_for_backward(hidden, weight, rows, targets, logsumexp, entropy)
        ctx.shard = shard
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, rows, targets, logsumexp, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        full = _gather_sequence(hidden, shard)
        d_full = torch.zeros_like(full)
        d_weight = _weight_accumulator(weight)
        for part in _chunks(rows.shape[0], shard.chunk):
            chunk = full.index_select(0, rows[part])
            log_p = _scaled_logits(chunk, weight, shard).sub_(logsumexp[part, None])
            d_logits = _logits_gradient(
                log_p, targets[part], entropy[part], _part(d_logprob, part), _part(d_entropy, part), shard
            )
            d_logits = d_logits.to(weight.dtype)
            d_full.index_copy_(0, rows[part], d_logits @ weight)
            _accumulate(d_weight, d_logits, chunk)
        return _reduce_sequence(d_full, hidden, shard), _give_back(weight, d_weight), None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(a, min(a + size, total)) for a in range(0, total, size)]


def _gather_sequence(hidden: Tensor, shard: VocabShard) -> Tensor:
    if shard.tp == 1 or not shard.sequence_parallel:
        return hidden
    full = hidden.new_empty(hidden.shape[0] * shard.tp, hidden.shape[1])
    dist.all_gather_into_tensor(full, hidden.contiguous(), group=shard.group)
    return full


def _reduce_sequence(d_full: Tensor, hidden: Tensor, shard: VocabShard) -> Tensor:
    """Sum over the vocabulary shards; under sequence parallelism each rank keeps its own rows."""
    if shard.tp == 1:
        return d_full
    if shard.sequence_parallel:
        mine = torch.empty_like(hidden)
        dist.reduce_scatter_tensor(mine, d_full, group=shard.group)
        return mine
    dist.all_reduce(d_full, group=shard.group)
    return d_full


def _scaled_logits(chunk: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
    """fp32 logits [c, v] of this rank's vocabulary shard, divided by the temperature; -inf on padding."""
    logits = (chunk @ weight.t()).float()
    if shard.temperature != 1.0:
        logits.div_(shard.temperature)
    real = shard.real_columns(weight.shape[0])
    if real < weight.shape[0]:
        logits[:, real:] = -torch.inf
    return logits


def _finite(log_p: Tensor, shard: VocabShard) -> Tensor:
    """In place: -inf of padding as a large number, since p log p of an impossible column is 0, not 0 * -inf."""
    real = shard.real_columns(log_p.shape[1])
    if real < log_p.shape[1]:
        log_p[:, real:] = -1e30
    return log_p


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _own(targets: Tensor, size: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """(is the target in this shard, its column here)."""
    local = targets - shard.group.rank() * size
    return (local >= 0) & (local < size), local.clamp(0, size - 1)


def _statistics(logits: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """log-prob, entropy and logsumexp [c]; destroys `logits`."""
    top = logits.amax(-1)
    if shard.tp > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    own, column = _own(targets, logits.shape[1], shard)
    logits.sub_(top[:, None])
    target = logits.gather(1, column[:, None])[:, 0].masked_fill_(~own, 0.0)
    e = logits.exp()
    sums = torch.stack([e.sum(-1), target, _finite(logits, shard).mul_(e).sum(-1)])
    if shard.tp > 1:
        dist.all_reduce(sums, group=shard.group)
    log_sum = sums[0].log()
    return sums[1] - log_sum, log_sum - sums[2] / sums[0], log_sum + top


def _logits_gradient(
    log_p: Tensor,
    targets: Tensor,
    entropy: Tensor,
    d_logprob: Tensor | None,
    d_entropy: Tensor | None,
    shard: VocabShard,
) -> Tensor:
    """d/dz = d_logprob (1[target] - p) - d_entropy p (log p + H), over the temperature; destroys `log_p`."""
    own, column = _own(targets, log_p.shape[1], shard)
    if d_logprob is None:
        d_logprob = torch.zeros_like(entropy)
    if d_entropy is None:
        gradient = log_p.exp_().mul_(-d_logprob[:, None])
    else:
        p = log_p.exp()
        _finite(log_p, shard).add_(entropy[:, None]).mul_(-d_entropy[:, None]).sub_(d_logprob[:, None])
        gradient = log_p.mul_(p)
    gradient.scatter_add_(1, column[:, None], (d_logprob * own)[:, None])
    return gradient.div_(shard.temperature) if shard.temperature != 1.0 else gradient


def _weight_accumulator(weight: Tensor) -> Tensor | None:
    """fp32 tensor that collects the weight's gradient over the chunks; None for a frozen weight."""
    if not weight.requires_grad:
        return None
    if hasattr(weight, "main_grad") and weight.main_grad.dtype == torch.float32:
        return weight.main_grad
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _accumulate(d_weight: Tensor | None, d_logits: Tensor, chunk: Tensor) -> None:
    if d_weight is None:
        return
    if d_weight.dtype == d_logits.dtype:
        d_weight.addmm_(d_logits.t(), chunk)
    else:
        d_weight.add_(d_logits.t() @ chunk)


def _give_back(weight: Tensor, d_weight: Tensor | None) -> Tensor | None:
    """The gradient for autograd, unless it already lies where it belongs."""
    if d_weight is None or d_weight is getattr(weight, "main_grad", None):
        return None
    return d_weight.to(weight.dtype)
