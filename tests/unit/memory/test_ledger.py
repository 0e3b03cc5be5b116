"""The order of the loop passes; every single departure from it fails with the ledger's message."""

import mmap

import pytest
import torch

from colocate_grpo.memory.ledger import GIB, Ledger, LedgerError, memory_figures

CPU = torch.device("cpu")
TRAINER = ("weights", "gradients", "optimizer")

# (verb, argument): `enter` a phase, `on`/`off` a class, `work` = the phase's work begins
START = [
    ("enter", "engine_start"), ("on", "engine_weights"), ("on", "kv_cache"), ("off", "engine_weights"),
    ("off", "kv_cache"), ("enter", "trainer_start"), *[("on", c) for c in TRAINER], *[("off", c) for c in TRAINER[1:]],
]  # fmt: skip
PUSH = [
    ("enter", "push"), ("on", "engine_weights"), ("work", ""), ("off", "weights"),
]  # fmt: skip
ROLLOUT = [("enter", "rollout"), ("on", "kv_cache"), ("work", ""), ("off", "kv_cache"), ("off", "engine_weights")]
TRAIN = [("enter", "train"), *[("on", c) for c in TRAINER], ("work", ""), *[("off", c) for c in TRAINER[1:]]]
CYCLE = [*PUSH, *ROLLOUT, *TRAIN, *PUSH, *ROLLOUT, ("enter", "idle")]


def play(ledger, moves):
    for verb, argument in moves:
        if verb == "enter":
            ledger.enter(argument)
        elif verb == "work":
            ledger.require()
        else:
            ledger.note(argument, verb == "on")


def test_the_loop_in_order_passes():
    play(Ledger(CPU), [*START, *CYCLE])


@pytest.mark.parametrize("left_out", [i for i, (verb, _) in enumerate(CYCLE) if verb in ("on", "off")])
def test_leaving_out_any_sleep_or_wake_fails(left_out):
    with pytest.raises(LedgerError, match="memory ledger: "):
        play(Ledger(CPU), [*START, *CYCLE[:left_out], *CYCLE[left_out + 1 :]])


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([("enter", "rollout"), ("on", "weights")], "weights may not become resident in phase rollout"),
        ([("enter", "train"), ("on", "kv_cache")], "kv_cache may not become resident in phase train"),
        ([("enter", "push"), ("on", "optimizer")], "optimizer may not become resident in phase push"),
        ([("enter", "push"), ("on", "kv_cache")], "kv_cache may not become resident in phase push"),
        ([("enter", "train"), ("on", "weights"), ("work", "")], "phase train needs gradients, optimizer"),
        ([("enter", "train"), ("on", "weights"), ("enter", "rollout")], "weights still resident when phase rollout"),
        ([("enter", "rollout"), ("on", "kv_cache"), ("enter", "train")], "kv_cache still resident when phase train"),
    ],
)
def test_wrong_orders_say_what_and_where(moves, message):
    with pytest.raises(LedgerError, match=message):
        play(Ledger(CPU), moves)


def test_memory_is_measured_at_every_phase():
    ledger = Ledger(CPU)
    ledger.enter("rollout")
    ballast = mmap.mmap(-1, 256 * 2**20)  # from the kernel: an allocator might hand out pages that are resident already
    ballast.write(b"\1" * len(ballast))
    ledger.enter("train")
    metrics = ledger.metrics()
    assert metrics["memory/train/host_rss_gib"] - metrics["memory/rollout/host_rss_gib"] > 0.15, (
        "others may give some back"
    )
    assert {m.split("/")[2] for m in metrics} == {f"{k}_gib" for k in memory_figures(CPU)}
    assert metrics["memory/train/free_gib"] * GIB > len(ballast)
    assert ledger.metrics() == {}


@pytest.mark.parametrize(("used_gib", "warned"), [(3.4, False), (3.6, True)])
def test_what_stays_with_everything_asleep_is_compared_with_the_plan(used_gib, warned, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int((24 - used_gib) * GIB), 24 * GIB))
    ledger = Ledger(torch.device("cuda", 0), tolerance_bytes=GIB // 2)
    ledger.compare_asleep(3 * GIB)
    assert ledger.metrics()["memory/idle/beyond_plan_gib"] == pytest.approx(used_gib - 3)
    assert ("in use in phase idle with everything asleep, planned 3.00 GiB" in caplog.text) is warned
