"""Shared by all tests: this folder is importable (small_models), and the demo's model is made once."""

from __future__ import annotations

import pytest

from colocate_grpo.demo.recipe import DemoPaths, make_demo


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory) -> DemoPaths:
    """The demo's real model and data, by the shipped recipe."""
    return make_demo(tmp_path_factory.mktemp("demo_model"), seed=0)
