"""Whether this machine has an NVIDIA card, without loading torch or a driver."""

from __future__ import annotations

from pathlib import Path

WSL_DRIVER = Path("usr/lib/wsl/lib/libcuda.so.1")


def has_nvidia_card(root: Path = Path("/")) -> bool:
    """True where the driver shows a card; not always number 0: a container may be given another one.

    Under WSL2 cards have no device file, but the host's driver is there. Whether torch can use a card is another
    question (`train/parallel.py`).
    """
    return any((root / "dev").glob("nvidia[0-9]*")) or (root / WSL_DRIVER).exists()
