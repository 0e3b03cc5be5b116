"""A push is one transaction over every engine, with the bytes counted once."""

import asyncio
from typing import ClassVar

import pytest
import torch

from colocate_grpo.rollout.engine import EngineError
from colocate_grpo.weights.push import push, verify


class Trainer:
    tensors: ClassVar = {f"w{i}": torch.full((16, 16), float(i)) for i in range(5)}

    def hf_buckets(self, max_bytes):
        assert max_bytes == 2 * 2**20
        for item in self.tensors.items():
            yield [item]

    def checksums(self):
        return {name: str(t.sum().item()) for name, t in self.tensors.items()}


class Engine:
    """Records the calls and keeps copies of what it is given."""

    def __init__(self):
        self.calls, self.held, self.weight_version = [], {}, -1

    async def begin_update(self, version):
        self.calls.append("begin")
        self.pending = version

    async def apply_bucket(self, bucket):
        self.calls.append("apply")
        self.held |= {name: tensor.clone() for name, tensor in bucket}

    async def end_update(self):
        self.calls.append("end")
        self.weight_version = self.pending

    async def checksums(self):
        return {name: str(t.sum().item()) for name, t in self.held.items()}


def test_every_engine_gets_every_bucket_once_in_one_transaction():
    engines = [Engine(), Engine()]
    stats = asyncio.run(push(Trainer(), engines, version=7, bucket_mib=2))
    for engine in engines:
        assert engine.calls == ["begin", *["apply"] * 5, "end"]
        assert engine.weight_version == 7
        assert all(torch.equal(engine.held[n], t) for n, t in Trainer.tensors.items())
    assert stats.bytes == 5 * 16 * 16 * 4
    assert stats.gb_per_s > 0


def test_a_rank_without_engines_takes_part():
    assert asyncio.run(push(Trainer(), [], version=0, bucket_mib=2)).bytes == 5 * 16 * 16 * 4


def test_verify_names_a_weight_that_differs():
    engine = Engine()
    asyncio.run(push(Trainer(), [engine], version=1, bucket_mib=2))
    asyncio.run(verify(Trainer(), [engine]))
    engine.held["w3"] += 1
    with pytest.raises(EngineError, match=r"1 of 5 weights differ .* first w3"):
        asyncio.run(verify(Trainer(), [engine]))
