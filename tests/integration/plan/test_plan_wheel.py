"""An installed wheel carries the configurations and the shapes of models, and finds them from anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMAND = """
import colocate_grpo, sys
from colocate_grpo.cli import main
print(colocate_grpo.__path__[0], file=sys.stderr)
main()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel that is built from a copy of the repository."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("colocate_grpo", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", "out"]
    subprocess.run(build, cwd=source, check=True, timeout=300)
    [wheel] = (source / "out").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def plan(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "plan", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr.splitlines()[0] == str(installed / "colocate_grpo"), done.stderr
    return done


def test_everything_is_in_it(installed: Path) -> None:
    for path in (ROOT / "configs").rglob("*.*"):
        carried = installed / "colocate_grpo" / path.relative_to(ROOT)
        assert carried.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["qwen3_4b_8x4090.yaml", "configs/demo.yaml"])
def test_plan_finds_configuration_and_model_by_name(installed: Path, tmp_path: Path, name: str) -> None:
    done = plan(installed, tmp_path, name, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"]


def test_an_own_file_comes_first_and_a_wrong_name_gets_the_nearest(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("model: {path: nowhere}\ndata: {train: t}\n")
    assert "model.path: nowhere does not exist" in plan(installed, tmp_path, "demo.yaml").stderr
    done = plan(installed, tmp_path, "qwen3_4b_8x490.yaml")
    assert done.returncode == 2
    assert "no such configuration file (did you mean qwen3_4b_8x4090.yaml?)" in done.stderr
    assert "no such configuration file" in plan(installed, tmp_path, "elsewhere/demo.yaml").stderr
