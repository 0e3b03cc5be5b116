from __future__ import annotations

import pytest
import small_models
import torch
from embedded_generator import Generator


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """(model, directory) by family, each built once."""
    made = {}

    def get(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = (small_models.build(family).eval(), small_models.write(family, directory))
        return made[family]

    return get


@pytest.fixture(scope="session")
def generator(models):
    """Engines by family, number of slots and type; each made once."""
    made = {}

    def get(family="qwen3", slots=16, dtype="float32") -> Generator:
        key = (family, slots, dtype)
        if key not in made:
            model, directory = models(family)
            made[key] = Generator(model.to(getattr(torch, dtype)), directory, slots, dtype)
            model.float()
        return made[key]

    yield get
    for each in made.values():
        each.runner.run(each.engine.stop())
        each.runner.close()
