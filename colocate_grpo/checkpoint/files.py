"""Files that survive a power cut: atomic writes, fsync, hashes, and removal nobody can mistake for damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 8 << 20
HASH_THREADS = 8
REMOVED_PREFIX = ".removed_"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: a reader sees the old file or the new one, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def read_json(path: Path) -> Any:
    """The value in `path`, or None where the file is absent or is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(root: Path) -> list[Path]:
    """Every regular file below `root`, sorted."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def sync_tree(root: Path) -> None:
    """Make the contents of every file and directory below `root` durable."""
    for path in files_below(root):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        sync_directory(directory)


def sha256(path: Path) -> str:
    """Hash of a file, read in blocks: a checkpoint is larger than the memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_all(paths: Iterable[Path]) -> dict[Path, str]:
    """Hashes of many files at once; hashlib releases the interpreter's lock, so threads scale."""
    paths = list(paths)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        return dict(zip(paths, threads.map(sha256, paths), strict=True))


def remove_tree(path: Path) -> None:
    """Remove a directory; cut off anywhere, what is left no longer has the directory's name."""
    doomed = path.with_name(f"{REMOVED_PREFIX}{path.name.lstrip('.')}")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)
