"""The model directory: every weight of the index is in its file, and every file is as long as its header says."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

MEND = "download the model again (downloads go on where they stopped)"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
LONGEST_HEADER = 100_000_000


class Damaged(Exception):
    """A file that is not what it should be; one line."""


def check(context: Context) -> Finding:
    path = context.required_config.model.path
    directory = context.model_dir
    if directory is None and path.startswith(("hf:", "modelscope:")):
        return ok(f"{path} is fetched at the start of the run")
    if directory is None:
        return fail(f"model.path: {path} is no directory", "give a Hugging Face model directory, or hf:NAME")
    problems = list(_problems(directory))
    if problems:
        return fail(f"{directory}: {'; '.join(problems[:3])}", MEND)
    if not (directory / "generation_config.json").is_file():
        return warn(f"{directory} has no generation_config.json", "its EOS ids may be incomplete: see `tokenizer`")
    return ok(f"{directory}: {len(_files(directory))} weight files complete")


def _problems(directory: Path) -> Iterator[str]:
    if not (directory / "config.json").is_file():
        yield "config.json is missing"
    try:
        expected = weights_by_file(directory)
    except Damaged as damage:
        yield str(damage)
        return
    if not expected:
        yield "no safetensors"
    for name, weights in expected.items():
        try:
            _compare(directory / name, weights)
        except Damaged as damage:
            yield f"{name} {damage}"


def weights_by_file(directory: Path) -> dict[str, set[str] | None]:
    """Weights that each file must hold: by the index; None where there is none and any will do.

    Raises Damaged where the index is broken, or missing beside files that are numbered parts of a whole.
    """
    index = directory / INDEX
    if index.is_file():
        return _by_index(index)
    names = [file.name for file in _files(directory)]
    parts = [found for name in names if (found := SHARD.fullmatch(name)) and int(found[3]) > 1]
    if parts:
        count = int(parts[0][3])
        raise Damaged(f"{INDEX} is missing, and {len(parts)} of {count} parts are here")
    return dict.fromkeys(names)


def _by_index(index: Path) -> dict[str, set[str] | None]:
    try:
        content = json.loads(index.read_bytes())
    except ValueError as error:
        raise Damaged(f"{INDEX} is no JSON ({str(error).splitlines()[0]})") from None
    weight_map = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise Damaged(f"{INDEX} has no weight_map of weights to files")
    files: dict[str, set[str] | None] = {}
    for file in sorted(set(weight_map.values()) | _parts_of(weight_map.values())):
        files[file] = {weight for weight, place in weight_map.items() if place == file}
    return files


def _parts_of(names: Any) -> set[str]:
    """All parts of every set of which the index names one."""
    found = {match for name in names if (match := SHARD.fullmatch(name))}
    sets = {(match[1], len(match[2]), match[3]) for match in found}
    return {
        f"{stem}-{part:0{digits}d}-of-{count}.safetensors"
        for stem, digits, count in sets
        for part in range(1, int(count) + 1)
    }


def _compare(file: Path, weights: set[str] | None) -> None:
    if not file.is_file():
        raise Damaged("is missing")
    header, expected = read_header(file)
    if expected != file.stat().st_size:
        raise Damaged(f"has {file.stat().st_size:,} bytes, its header says {expected:,}")
    absent = sorted((weights or set()) - header)
    if absent:
        raise Damaged(f"holds other weights than {INDEX} says ({len(absent)} are not in it, first {absent[0]})")


def read_header(file: Path) -> tuple[set[str], int]:
    """Names of the weights in a safetensors file, and the bytes that its header promises. Raises Damaged."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = stream.read(min(length, LONGEST_HEADER))
    try:
        tensors = json.loads(header)
        weights = {name: entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"}
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):  # cut off, or another kind of file
        raise Damaged("has no whole header") from None
    return set(weights), 8 + length + max(weights.values(), default=0)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))
