"""Configurations and shapes of models that come with the package: the repository's `configs/`, also in a wheel."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parent / "configs"
MODELS = CONFIGS / "models"


def shipped_config(path: Path) -> Path | None:
    """The shipped file that `demo.yaml` or `configs/demo.yaml` means where there is no such file; None for others."""
    found = CONFIGS / path.name
    return found if path.parent in (Path(), Path("configs")) and path.suffix and found.is_file() else None


def config_names() -> list[str]:
    """File names of the shipped configurations."""
    return sorted(path.name for path in CONFIGS.glob("*.yaml"))
