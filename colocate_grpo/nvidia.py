"""What this machine has of NVIDIA's, without loading torch or a driver."""

from __future__ import annotations

import sysconfig
from pathlib import Path

WSL_DRIVER = Path("usr/lib/wsl/lib/libcuda.so.1")


def has_nvidia_card(root: Path = Path("/")) -> bool:
    """True where the driver shows a card; not always number 0: a container may be given another one.

    Under WSL2 cards have no device file, but the host's driver is there. Whether torch can use a card is another
    question (`train/parallel.py`).
    """
    return any((root / "dev").glob("nvidia[0-9]*")) or (root / WSL_DRIVER).exists()


def runtime_libraries() -> list[Path]:
    """Directories of this environment that hold CUDA's runtime library, as torch's own requirements bring it."""
    packages = Path(sysconfig.get_path("purelib"))
    return sorted({library.parent for library in packages.glob("nvidia/*/lib/libcudart.so.*")})
