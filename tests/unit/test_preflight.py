"""What is refused before any process is started, and by which commands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from colocate_grpo import preflight as preflight_module
from colocate_grpo.config import Config
from colocate_grpo.doctor.command import run_doctor
from colocate_grpo.errors import ConfigError, DataError
from colocate_grpo.plan.command import run_plan
from colocate_grpo.preflight import check_engine_options, preflight
from colocate_grpo.rollout import sglang_options

SIZES = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64,
    "intermediate_size": 32, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def config(tmp_path) -> Config:
    """SGLang with an option that it does not have, and a model of which only the configuration is there."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    rollout = {"engine": "sglang", "sglang": {"max_total_tokns": 64}}
    return Config.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "d"}, "rollout": rollout})


@pytest.fixture
def without_sglang(monkeypatch) -> None:
    for module in (preflight_module, sglang_options.importlib.util):
        monkeypatch.setattr(module, "find_spec", lambda *_: None)
    sglang_options.option_names.cache_clear()


@pytest.mark.parametrize(
    "command",
    [
        preflight,
        check_engine_options,
        lambda config: run_plan(config, json_out=False, compare=False),
        lambda config: run_doctor(config, json_out=False),
    ],
)
def test_an_unknown_option_of_sglang_is_refused(config: Config, command: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"max_total_tokns: SGLang has no such option \(did you mean max_total_tokens"
    ):
        command(config)


def test_without_sglang_only_a_run_with_an_engine_is_refused_for_it(config: Config, without_sglang: None) -> None:
    check_engine_options(config)
    with pytest.raises(ConfigError, match="sglang is not installed"):
        preflight(config)
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        preflight(config, with_engine=False)
