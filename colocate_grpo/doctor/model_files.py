"""The model directory: every file of the index is there and as long as its header says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

MEND = "download the model again (downloads go on where they stopped)"


def check(context: Context) -> Finding:
    path = context.required_config.model.path
    if path.startswith(("hf:", "modelscope:")):
        return ok(f"{path} is fetched at the start of the run")
    directory = context.model_dir
    if directory is None:
        return fail(f"model.path: {path} is no directory", "give a Hugging Face model directory, or hf:NAME")
    problems = list(_problems(directory))
    if problems:
        return fail(f"{directory}: {'; '.join(problems[:3])}", MEND)
    if not (directory / "generation_config.json").is_file():
        return warn(f"{directory} has no generation_config.json", "its EOS ids may be incomplete: see `tokenizer`")
    return ok(f"{directory}: {len(_weight_files(directory))} weight files complete")


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names: Iterable[str] = json.loads(index.read_text())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    return sorted(directory.glob("*.safetensors"))


def _problems(directory: Path) -> Iterable[str]:
    if not (directory / "config.json").is_file():
        yield "config.json is missing"
    files = _weight_files(directory)
    if not files:
        yield "no safetensors"
    for file in files:
        if not file.is_file():
            yield f"{file.name} is missing"
        elif (expected := safetensors_size(file)) != file.stat().st_size:
            yield f"{file.name} has {file.stat().st_size:,} bytes, its header says {expected:,}"


def safetensors_size(file: Path) -> int:
    """Bytes that the header of a safetensors file promises; -1 where the header itself is cut off."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return -1
        (length,) = struct.unpack("<Q", prefix)
        header = stream.read(min(length, 100_000_000))
    try:
        tensors = json.loads(header)
    except ValueError:  # cut off, or no safetensors file (bytes that are no UTF-8 are a ValueError too)
        return -1
    ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)
