"""What a user can have got wrong, told before any process is started and any file is written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from colocate_grpo.config import Config
from colocate_grpo.data import eos_ids, load_eval_set, load_prompts, load_tokenizer
from colocate_grpo.errors import ConfigError
from colocate_grpo.hub import resolve_model
from colocate_grpo.nvidia import has_nvidia_card
from colocate_grpo.plan.assessment import check_layout
from colocate_grpo.reward.builtin import load_reward
from colocate_grpo.rollout.sglang_options import check_options
from colocate_grpo.train.shape import read_hf_config, validate_model
from colocate_grpo.weights.headers import check_headers, read_headers


def check_engine_options(config: Config) -> None:
    """ConfigError for an option that this machine's SGLang does not have; where it has none, nothing is known."""
    if config.rollout.engine == "sglang" and find_spec("sglang"):
        check_options(config.rollout.sglang)


def preflight(config: Config, *, with_engine: bool = True) -> Path:
    """Check engine options, model, data and reward of a run; returns the model directory.

    `with_engine`: False for a replay, which starts none. Raises ConfigError or DataError.
    """
    if config.run.device == "cuda" and not has_nvidia_card():
        raise ConfigError("run.device: cuda, but there is no NVIDIA card here; see `doctor`")
    if config.rollout.engine == "sglang" and with_engine:
        check_options(config.rollout.sglang)
    model_dir = resolve_model(config.model)
    shape = validate_model(config, read_hf_config(model_dir))
    if with_engine:
        check_layout(shape, config)
    check_headers(read_headers(model_dir), shape, model_dir)
    load_reward(config.reward.function, config.reward.options)
    tokenizer = load_tokenizer(model_dir)
    eos_ids(model_dir, tokenizer)
    train = load_prompts(config.data, tokenizer)
    for spec in config.eval.sets:
        load_eval_set(spec, config.data, tokenizer, train)
    return model_dir
