"""Where an exported model may be written."""

from __future__ import annotations

import pytest

from colocate_grpo.demo.command import run_demo_model
from colocate_grpo.errors import DataError
from colocate_grpo.weights.export import write_hf


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_another_model_is_not_written_over(tmp_path, file):
    (tmp_path / file).write_text("weights")
    with pytest.raises(DataError, match="holds another model already"):
        write_hf(iter(()), tmp_path, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [file]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(DataError, match="not a directory that can be written"):
        write_hf(iter(()), tmp_path, tmp_path / "out")


def test_the_demo_model_needs_a_directory_of_its_own(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"holds other files \(thesis.tex\)"):
        run_demo_model(tmp_path, 0)
    assert (tmp_path / "model").exists()
