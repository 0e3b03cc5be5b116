"""On CPU, sleep really drops the memory, and waking brings every bit back."""

import pytest
import torch

from colocate_grpo.memory.ledger import Ledger, LedgerError
from colocate_grpo.memory.saver import Saver

CPU = torch.device("cpu")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().view(torch.uint8)


@pytest.fixture(params=["host", "disk"])
def saver(request, tmp_path):
    return Saver(CPU, backup_dir=tmp_path / "backup" if request.param == "disk" else None)


def test_every_bit_comes_back_through_every_view(saver):
    buffer = torch.randn(1000).to(torch.bfloat16)
    buffer[3], buffer[4] = float("nan"), float("inf")
    parameter = torch.nn.Parameter(buffer[100:400].view(30, 10))
    moments = [torch.randn(77, dtype=torch.float64), torch.tensor(-0.0)]
    saver.register("weights", lambda: [parameter, buffer])
    saver.register("optimizer", lambda: moments)
    expected = [bits(buffer), bits(parameter), bits(moments[0]), moments[1].clone()]

    for tag in ("weights", "optimizer"):
        assert saver.resident_bytes(tag) > 0
        saver.pause(tag)
        assert saver.resident_bytes(tag) == 0
    assert buffer.untyped_storage().size() == 0
    for tag in ("optimizer", "weights"):
        saver.resume(tag)

    assert torch.equal(bits(buffer), expected[0])
    assert torch.equal(bits(parameter), expected[1])
    assert torch.equal(bits(moments[0]), expected[2])
    assert torch.signbit(moments[1])
    assert parameter.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_memory_that_cannot_be_freed_is_poisoned(saver):
    shared = torch.frombuffer(bytearray(400), dtype=torch.float32)
    shared.copy_(torch.arange(100))
    saver.register("weights", lambda: [shared])
    saver.pause("weights")
    assert torch.isnan(shared).all()
    saver.resume("weights")
    assert torch.equal(shared, torch.arange(100, dtype=torch.float32))


def test_scratch_comes_back_as_zeros_and_keeps_no_copy(tmp_path):
    saver = Saver(CPU, backup_dir=tmp_path)
    gradients = torch.randn(50)
    saver.register("gradients", lambda: [gradients], backup=False)
    saver.pause("gradients")
    assert list(tmp_path.iterdir()) == []
    saver.resume("gradients")
    assert torch.equal(gradients, torch.zeros(50))


def test_state_created_after_registration_sleeps_too(saver):
    state: list[torch.Tensor] = []
    saver.register("optimizer", lambda: state)
    state.append(torch.ones(8))
    saver.pause("optimizer")
    assert state[0].untyped_storage().size() == 0
    saver.resume("optimizer")
    assert torch.equal(state[0], torch.ones(8))


def test_pause_and_resume_are_idempotent(saver):
    weights = torch.randn(10)
    expected = bits(weights)
    saver.register("weights", lambda: [weights])
    saver.resume("weights")
    saver.pause("weights")
    saver.pause("weights")
    saver.resume("weights")
    saver.resume("weights")
    assert torch.equal(bits(weights), expected)


def test_a_forbidden_resume_fails_before_it_allocates():
    ledger = Ledger(CPU)
    saver = Saver(CPU, ledger=ledger)
    weights = torch.randn(10)
    ledger.enter("trainer_start")
    saver.register("weights", lambda: [weights])
    saver.pause("weights")
    ledger.enter("rollout")
    with pytest.raises(LedgerError, match="weights may not become resident in phase rollout"):
        saver.resume("weights")
    assert saver.resident_bytes("weights") == 0
