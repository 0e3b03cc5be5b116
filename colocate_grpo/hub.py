"""Models and data by hub name: `hf:OWNER/NAME`, `modelscope:OWNER/NAME`; of data, `hf:OWNER/NAME/FILE`.

The hubs' own libraries download, resume and show progress, into their own caches. A receipt says that a download was
complete, so that the ranks, and every later start, need no network; a cache alone cannot tell half from whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from colocate_grpo.checkpoint.files import files_below, read_json, write_json
from colocate_grpo.config import ModelConfig
from colocate_grpo.errors import ConfigError

HUBS = ("hf", "modelscope")
MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
TOKENIZER_FILES = [pattern for pattern in MODEL_FILES if pattern != "*.safetensors"]
Download = Callable[[str, str, str | None, list[str]], str]


class HubUnreachable(ConfigError):
    """The hub does not answer, and what is asked for was not downloaded before."""


def resolve_model(model: ModelConfig) -> Path:
    """Local directory of a model, downloaded if need be. ConfigError in one line where it cannot be had."""
    hub, name = _split(model.path)
    if hub is None:
        return Path(model.path)
    _check(re.fullmatch(r"[\w.-]+/[\w.-]+", name), "model.path", model.path, f"{hub}:OWNER/NAME")
    return _resolve("model.path", hub, "model", name, model.revision, MODEL_FILES)


def downloaded_model(model: ModelConfig) -> Path | None:
    """Local directory of a hub model whose download is complete, without looking at the network; else None."""
    hub, name = _split(model.path)
    return _complete(_receipt(hub, "model", name, model.revision, MODEL_FILES)) if hub else None


def fetch_model_config(model: ModelConfig) -> Path:
    """config.json of a hub model, alone. ConfigError in one line where it cannot be had."""
    hub, name = _split(model.path)
    assert hub is not None, f"{model.path} is no hub name"
    _check(re.fullmatch(r"[\w.-]+/[\w.-]+", name), "model.path", model.path, f"{hub}:OWNER/NAME")
    return _resolve("model.path", hub, "model", name, model.revision, ["config.json"]) / "config.json"


def resolve_data(path: str, key: str = "data.train") -> Path:
    """Local path of a data file, downloaded if need be. ConfigError names `key`."""
    hub, name = _split(path)
    if hub is None:
        return Path(path)
    match = _check(re.fullmatch(r"([\w.-]+/[\w.-]+)/(.+)", name), key, path, f"{hub}:OWNER/NAME/FILE")
    return _resolve(key, hub, "dataset", match[1], None, [match[2]]) / match[2]


def resolve_tokenizer(path: str, key: str = "--tokenizer") -> Path:
    """Local directory of a model's small files, downloaded if need be. ConfigError names `key`."""
    hub, name = _split(path)
    if hub is None:
        if not Path(path).is_dir():
            raise ConfigError(f"{key}: {path} is no directory (give a model directory, or hf:OWNER/NAME)")
        return Path(path)
    _check(re.fullmatch(r"[\w.-]+/[\w.-]+", name), key, path, f"{hub}:OWNER/NAME")
    return _resolve(key, hub, "model", name, None, TOKENIZER_FILES)


def cache_directory() -> Path:
    """Where the project keeps what it would otherwise fetch again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colocate_grpo"


def _split(text: str) -> tuple[str | None, str]:
    hub, colon, name = text.partition(":")
    return (hub, name) if colon and hub in HUBS else (None, text)


def _check(match: re.Match[str] | None, key: str, value: str, form: str) -> re.Match[str]:
    if match is None:
        raise ConfigError(f"{key}: {value!r} is no hub name; the form is {form}")
    return match


def _resolve(key: str, hub: str, kind: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    receipt = _receipt(hub, kind, name, revision, patterns)
    if known := _complete(receipt):
        return known
    download = _from_hf if hub == "hf" else _from_modelscope
    try:
        directory = Path(download(name, kind, revision, patterns))
    except ImportError:
        raise ConfigError(f"{key}: {hub}:{name} needs the package {hub}: pip install {hub}") from None
    except Exception as error:  # each library has its own dozens; the user needs the name and the cause in one line
        kind_of_error = HubUnreachable if _is_unreachable(error) else ConfigError
        raise kind_of_error(f"{key}: {hub}:{name}{f'@{revision}' if revision else ''}: {_reason(error)}") from error
    files = [path for path in files_below(directory) if any(path.match(pattern) for pattern in patterns)]
    if not files:
        raise ConfigError(f"{key}: {hub}:{name} has no file {' or '.join(patterns)}")
    receipt.parent.mkdir(parents=True, exist_ok=True)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    write_json(receipt, {"path": str(directory), "files": sizes})
    return directory


def _receipt(hub: str, kind: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    what = "--".join([hub, kind, name, revision or "default", *(patterns if patterns != MODEL_FILES else [])])
    return cache_directory() / f"{re.sub(r'[^A-Za-z0-9._-]', '-', what)}.json"


def _complete(receipt: Path) -> Path | None:
    content = read_json(receipt)
    if not content:
        return None
    directory = Path(content["path"])
    whole = all(
        (directory / name).is_file() and (directory / name).stat().st_size == size
        for name, size in content["files"].items()
    )
    return directory if whole else None


def _from_hf(name: str, kind: str, revision: str | None, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))


def _from_modelscope(name: str, kind: str, revision: str | None, patterns: list[str]) -> str:
    from modelscope import snapshot_download

    return str(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))


def _is_unreachable(error: Exception) -> bool:
    kind = type(error).__name__
    return kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled") or "onnect" in f"{kind} {error}"


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if _is_unreachable(error):
        return "the hub cannot be reached, and the download is not complete; is the machine offline?"
    if kind in ("RepositoryNotFoundError", "NotExistError") or "404" in str(error):
        return "no such repository (or a private one, which needs a token)"
    if kind == "RevisionNotFoundError":
        return "no such revision"
    if kind == "GatedRepoError":
        return "its terms have to be accepted on the hub first, and a token set"
    return f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
