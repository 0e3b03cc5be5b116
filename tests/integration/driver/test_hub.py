"""Hub names, through the hubs' own libraries, against a hub on localhost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_in_hub import Hub, running

CODE = """
import sys
from colocate_grpo.config import ModelConfig
from colocate_grpo.errors import UserError
from colocate_grpo.hub import resolve_data, resolve_model
for name in sys.argv[1:]:
    try:
        print("RESULT", resolve_data(name) if name.endswith("jsonl") else resolve_model(ModelConfig(path=name)))
    except UserError as error:
        print("RESULT", f"error: {error}")
"""
# More than the libraries hold back before they write: only what has reached the disk can be resumed.
WEIGHTS = random.Random(0).randbytes(12 << 20)
CUT_AFTER = 11 << 20
DATA = b'{"prompt": "1 + 1", "label": "2"}\n'
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": WEIGHTS,
    "README.md": b"not needed",
    "train.jsonl": DATA,
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub("owner/tiny", dict(FILES))) as hub:
        yield hub


def resolve(names: list[str], cache: Path, url: str) -> list[str]:
    """One answer a name, resolved one after the other in a fresh process."""
    environment = {
        "HF_ENDPOINT": url, "HF_HOME": str(cache / "hf"), "MODELSCOPE_CACHE": str(cache / "ms"),
        "MODELSCOPE_DOMAIN": url, "XDG_CACHE_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE, *names], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]


@pytest.mark.parametrize("prefix", ["hf", "modelscope"])
def test_a_broken_download_is_resumed_and_later_ones_need_no_network(prefix: str, hub: Hub, tmp_path: Path) -> None:
    hub.cut_file, hub.cut_after = "model.safetensors", CUT_AFTER
    model = f"{prefix}:owner/tiny"
    names = [model, f"{model}/train.jsonl", f"{prefix}:owner/absent", f"{model}/x/y"]
    [first, data, *failed] = resolve(names, tmp_path, hub.url)
    assert any(entry.startswith("model.safetensors bytes=") for entry in hub.ranges), "goes on where it broke off"
    assert (Path(first) / "model.safetensors").read_bytes() == WEIGHTS
    assert not (Path(first) / "README.md").exists()
    assert Path(data).read_bytes() == DATA
    assert failed[0].startswith(f"error: model.path: {prefix}:owner/absent: no such repository")
    assert "is no hub name; the form is" in failed[1]
    assert all("\n" not in text for text in failed)

    nobody = "http://127.0.0.1:9"
    assert resolve([model, f"{model}/train.jsonl", f"{prefix}:owner/other"], tmp_path, nobody) == [
        first,
        data,
        f"error: model.path: {prefix}:owner/other: the hub cannot be reached, and the download is not complete; "
        "is the machine offline?",
    ]
    (Path(first) / "model.safetensors").unlink()
    [again] = resolve([model], tmp_path, hub.url)
    assert (Path(again) / "model.safetensors").read_bytes() == WEIGHTS
