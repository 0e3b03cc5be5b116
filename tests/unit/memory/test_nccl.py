"""Which communicators are suspended, told by torch's own groups; their memory is a question for a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from colocate_grpo.memory import nccl
from colocate_grpo.memory.ledger import Ledger
from colocate_grpo.memory.nccl import Communicators, nccl_backends


class Backend:
    """Counts; a communicator exists only after its first operation."""

    def __init__(self, used: bool):
        self.used, self.calls = used, []

    def _is_initialized(self) -> bool:
        return self.used

    def suspend(self) -> None:
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")


@pytest.fixture
def groups() -> Iterator[list[dist.ProcessGroup]]:
    """The world and one more group with a backend for each device, as on a GPU, and a group of gloo alone."""
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield [dist.group.WORLD, dist.new_group([0]), dist.new_group([0], backend="gloo")]
    dist.destroy_process_group()


def test_every_group_with_nccl_counts_also_those_that_megatron_does_not_name(
    groups: list[dist.ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dist.get_backend_config
    assert "cuda:gloo" in real(groups[0]), "how torch writes it"
    both = groups[:2]
    monkeypatch.setattr(dist, "get_backend_config", lambda g: "cpu:gloo,cuda:nccl" if g in both else real(g))
    assert list(nccl_backends()) == [group._get_backend(torch.device("cuda")) for group in both]


def test_used_communicators_are_suspended_once_and_resumed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = Backend(used=True), Backend(used=False)
    monkeypatch.setattr(nccl, "nccl_backends", lambda: iter([used, unused]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ledger = Ledger(torch.device("cpu"))
    ledger.enter("train")
    communicators = Communicators(ledger)
    communicators.resume()
    assert "nccl" in ledger.resident
    communicators.suspend()
    assert "nccl" not in ledger.resident
    unused.used = True
    communicators.resume()
    communicators.resume()
    assert (used.calls, unused.calls) == (["suspend", "resume"], [])
