"""Joining as one process, and waiting without a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_models as small
import torch

from colocate_grpo.errors import ConfigError
from colocate_grpo.train.parallel import Parallel


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    joined = Parallel.initialise(small.make_config(Path("model")))
    yield joined
    joined.shutdown()


def test_one_process_is_every_rank(parallel: Parallel) -> None:
    assert (parallel.rank, parallel.world, parallel.tp_rank, parallel.dp_rank) == (0, 1, 0, 0)
    assert parallel.is_main
    assert parallel.device == torch.device("cpu")
    assert torch.get_num_threads() == 1


def test_wait_returns_what_was_announced(parallel: Parallel) -> None:
    parallel.announce("phase/0", "rollout done")
    assert parallel.wait_for("phase/0", timeout=5) == "rollout done"


def test_wait_ends_when_another_client_announces(parallel: Parallel) -> None:
    other = parallel.store.clone()
    timer = threading.Timer(0.3, lambda: other.set("phase/1", "late"))
    timer.start()
    assert parallel.wait_for("phase/1", timeout=30) == "late"
    timer.join()


def test_wait_times_out_and_names_the_key(parallel: Parallel) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="'never'"):
        parallel.wait_for("never", timeout=0.5)
    assert time.monotonic() - start < 10


def test_number_of_processes_must_fit() -> None:
    with pytest.raises(ConfigError, match="needs 4 processes, but 1 were started"):
        Parallel.initialise(small.make_config(Path("model"), parallel={"tp": 2, "dp": 2}))
