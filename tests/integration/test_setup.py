"""launch/setup.sh with real virtual environments and a package of one file in the project's place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "launch" / "setup.sh"
PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "colocate_grpo"
version = "{version}"
optional-dependencies = {{ dev = [] }}
[tool.setuptools]
packages = ["colocate_grpo"]
"""
SHOW = "import colocate_grpo, importlib.metadata as m; print(colocate_grpo.__file__, m.version('colocate_grpo'))"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with pip, uv and setuptools and without the project, made without a network."""
    directory = tmp_path / "environment"
    venv.create(directory, with_pip=True)
    packages = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    (directory / "bin" / "uv").symlink_to(Path(sys.executable).parent / "uv")
    return {**os.environ, "COLOCATE_VENV": str(directory)}


def clone(directory: Path, version: str = "1.0") -> Path:
    (directory / "launch").mkdir(parents=True)
    (directory / "colocate_grpo").mkdir()
    (directory / "colocate_grpo" / "__init__.py").touch()
    shutil.copy(SETUP, directory / "launch")
    (directory / "pyproject.toml").write_text(PYPROJECT.format(version=version))
    return directory


def imported(repository: Path, environment: dict[str, str], extras: str = "") -> tuple[str, str, bool]:
    """The file and the version that are imported after setup.sh, outside the repository; whether it installed."""
    command = f'source {repository}/launch/setup.sh "{extras}" && cd / && python -c "{SHOW}"'
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    return file, version, "installing into" in done.stderr


def test_an_environment_shared_by_two_clones_imports_the_one_that_is_started(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    first, second = clone(tmp_path / "first"), clone(tmp_path / "second")
    for repository, installs in [(first, True), (first, False), (second, True), (first, True), (first, False)]:
        expected = (str(repository / "colocate_grpo" / "__init__.py"), "1.0", installs)
        assert imported(repository, environment) == expected


def test_extras_are_added_once_and_a_changed_project_is_installed_anew(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    repository = clone(tmp_path / "clone")
    file = str(repository / "colocate_grpo" / "__init__.py")
    for extras, installs in [("", True), ("dev", True), ("", False), ("dev", False)]:
        assert imported(repository, environment, extras) == (file, "1.0", installs)
    (repository / "pyproject.toml").write_text(PYPROJECT.format(version="2.0"))
    for extras, installs in [("dev", True), ("", True), ("dev", False)]:
        assert imported(repository, environment, extras) == (file, "2.0", installs)
