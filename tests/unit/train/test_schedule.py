from __future__ import annotations

import pytest

from colocate_grpo.config import OptimizerConfig
from colocate_grpo.train.schedule import learning_rate


def rates(updates: int, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, update, updates) for update in range(updates)]


def test_constant_after_the_warm_up() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_ends_at_its_floor() -> None:
    assert rates(6, schedule="linear", warmup_steps=1, min_lr_ratio=0.1) == pytest.approx(
        [1.0, 1.0, 0.82, 0.64, 0.46, 0.28]
    )
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert learning_rate(config, 1000, 10) == pytest.approx(0.1)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], rel=1e-5)


def test_decay_steps_overrides_the_length_of_the_run() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", decay_steps=10)
    assert learning_rate(config, 5, 1000) == pytest.approx(0.5)
