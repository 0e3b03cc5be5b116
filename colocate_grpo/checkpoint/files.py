"""Files that survive a power cut: atomic writes, fsync, hashes, and removal nobody can mistake for damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

BLOCK = 8 << 20
HASH_THREADS = 8
REMOVED_PREFIX = ".removed_"


def write_text(path: Path, text: str) -> None:
    """Replace the contents of `path`: a reader sees the old ones or the new ones, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk: what is half-written only takes more of it
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """The same for a value as JSON."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def read_json(path: Path) -> Any:
    """The value in `path`, or None where the file is absent or is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def read_object(path: Path, shape: type[BaseModel] | None = None) -> dict[str, Any]:
    """The JSON object in `path`; empty where the file is absent, or holds anything else than an object of `shape`."""
    value = read_json(path)
    return value if isinstance(value, dict) and (shape is None or has_shape(value, shape)) else {}


def has_shape(value: dict[str, Any], shape: type[BaseModel]) -> bool:
    """Whether `value` has at least the fields of `shape`, with values of their types."""
    try:
        shape.model_validate(value)
    except ValidationError:
        return False
    return True


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(root: Path) -> list[Path]:
    """Every regular file below `root`, sorted; another process may remove some meanwhile."""
    walk = os.walk(root, onerror=_unless_gone)
    return sorted(path for directory, _, names in walk for name in names if (path := Path(directory, name)).is_file())


def bytes_below(root: Path) -> int:
    """Size of all files below `root`; another process may remove some meanwhile."""
    total = 0
    for path in files_below(root):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


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


def remove(path: Path) -> None:
    """Remove a directory with all it holds, a file, or a link (not what it points to)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory; cut off anywhere, what is left no longer has the directory's name."""
    doomed = path.with_name(f"{REMOVED_PREFIX}{path.name.lstrip('.')}")
    remove(doomed)
    path.rename(doomed)
    remove(doomed)
