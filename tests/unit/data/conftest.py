from __future__ import annotations

import json

import pytest

from colocate_grpo.config import DataConfig
from colocate_grpo.demo.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """A real tokenizer with a chat template and a thinking switch."""
    return build_tokenizer()


@pytest.fixture
def write(tmp_path):
    """Write rows (dicts as JSON, bytes as they are) to a jsonl file."""

    def write(*rows, name="data.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write


@pytest.fixture
def settings():
    def settings(path, **values):
        return DataConfig.model_validate({"train": str(path), **values})

    return settings
