"""What a report makes of a run directory that something has happened to, and of a place that is none."""

from __future__ import annotations

import json

import pytest

from colocate_grpo.errors import DataError
from colocate_grpo.report.experiment import write_report


@pytest.mark.parametrize("config", ["run: [", "- a\n", "\x00", "{}"])
def test_a_damaged_configuration_is_missing(tmp_path, config):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 0, "attempt": 1, "time": 1.0}) + "\n")
    (tmp_path / "config.yaml").write_text(config)
    assert "`config.yaml` is missing or damaged" in write_report(tmp_path).read_text()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train: d}\n")
    for out in (tmp_path / "config.yaml", tmp_path / "config.yaml" / "report"):
        with pytest.raises(DataError) as error:
            write_report(tmp_path, out=out)
        assert str(error.value).startswith(f"{out}: not a directory that can be written (")
