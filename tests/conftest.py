"""Shared by all tests: this folder is importable (small_models), and the demo's model is made once."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from colocate_grpo.demo.recipe import DemoPaths, make_demo

# A busy machine is no slow test. The same examples each time, so that the same commit has the same result; a developer
# who looks for new ones sets EXPLORE=1.
settings.register_profile("repository", deadline=None, derandomize=not os.environ.get("EXPLORE"))
settings.load_profile("repository")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory) -> DemoPaths:
    """The demo's real model and data, by the shipped recipe."""
    return make_demo(tmp_path_factory.mktemp("demo_model"), seed=0)
