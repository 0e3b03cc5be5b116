"""The options of one SGLang server: ours, the user's (`rollout.sglang.OPTION`), and which of the user's are refused."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import yaml

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError, nearest

OWNED = {
    "api_key": "a random key a run",
    "base_gpu_id": "rollout.engines and rollout.tp",
    "device": "run.device",
    "dtype": "rollout.dtype",
    "enable_memory_saver": "the engine's sleep",
    "host": "loopback only",
    "incremental_streaming_output": "the client",
    "kv_cache_dtype": "memory.kv_dtype",
    "model_path": "model.path",
    "port": "a free port",
    "skip_tokenizer_init": "the client (token ids only)",
    "tp_size": "rollout.tp",
}
STREAM_INTERVAL = 64
CPU_KV_TOKENS = 65536


def check_options(options: dict[str, Any]) -> None:
    """Refuse unknown options, and those that the engine sets itself (ConfigError). Does not import SGLang."""
    known = option_names()
    for name in options:
        if name not in known:
            raise ConfigError(f"rollout.sglang.{name}: SGLang has no such option{nearest(name, known)}")
        if name in OWNED:
            raise ConfigError(f"rollout.sglang.{name}: cannot be set, it follows from {OWNED[name]}")


@functools.cache
def option_names() -> frozenset[str]:
    """Fields of SGLang's ServerArgs, read from its sources: importing them takes longer than a user's patience."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ConfigError("rollout.engine: sglang is not installed (pip install 'colocate-grpo[sglang]')")
    files = sorted((Path(spec.origin).parent / "srt" / "arg_groups" / "fields").glob("*.py"))
    classes = [n for f in files for n in ast.parse(f.read_text()).body if isinstance(n, ast.ClassDef)]
    fields = [n.target.id for c in classes for n in c.body
              if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]  # fmt: skip
    assert len(fields) > 100, f"no ServerArgs fields found in {spec.origin}"
    return frozenset(fields)


def server_options(config: Config, model_dir: Path, device: str, index: int, port: int, api_key: str) -> dict[str, Any]:
    """Everything that goes into the `--config` file of engine `index`; the user's options win over our defaults."""
    r = config.rollout
    defaults = {
        "load_format": "dummy",  # the first push brings every weight, and a missing one shows as nonsense
        "random_seed": (config.run.seed + index) % 2**31,
        "stream_interval": STREAM_INTERVAL,
        "sleep_on_idle": True,  # else its processes spin on the cores that the trainer and the reward need
        "log_level_http": "warning",
    }
    owned = {
        "model_path": str(model_dir),
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "dtype": r.dtype or config.model.dtype,
        "tp_size": r.tp,
        "host": "127.0.0.1",
        "port": port,
        "api_key": api_key,
        "device": device,
    }
    return {**defaults, **_device_defaults(config, device), **r.sglang, **owned, **_device_owned(config, device, index)}


def _device_defaults(config: Config, device: str) -> dict[str, Any]:
    if device == "cuda":
        # Consumer cards have no peer access, and the probe for it has every engine make contexts on every card.
        return {"disable_custom_all_reduce": True}
    return {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "enable_deterministic_inference": config.run.deterministic,  # seeds mean something only with it
        # The tokens bound the cache. The share would too, by memory that others on this machine take meanwhile.
        "max_total_tokens": cpu_kv_tokens(config),
        "mem_fraction_static": 0.9,
    }


def cpu_kv_tokens(config: Config) -> int:
    """Tokens of a CPU server's KV cache, unless `rollout.sglang.max_total_tokens` says otherwise."""
    return max(CPU_KV_TOKENS, 4 * (config.data.max_prompt_tokens + config.rollout.max_new_tokens))


def _device_owned(config: Config, device: str, index: int) -> dict[str, Any]:
    if device != "cuda":
        return {}
    return {
        "enable_memory_saver": True,
        "base_gpu_id": index * config.rollout.tp,
        "kv_cache_dtype": config.memory.kv_dtype,
    }


def write_options(path: Path, options: dict[str, Any]) -> None:
    """A YAML file that only its owner can read, also while it is being written: it holds the key."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
        yaml.safe_dump({name.replace("_", "-"): value for name, value in options.items()}, handle)
