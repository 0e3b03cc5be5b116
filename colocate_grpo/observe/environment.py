"""What a run ran on and with: versions, commit and hardware, recorded at every start."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pynvml

PACKAGES = ("colocate-grpo", "torch", "megatron-core", "transformers", "sglang", "torch-memory-saver", "math-verify")


def environment() -> dict[str, Any]:
    """Plain values for an `attempt_start` event; touches no CUDA context."""
    return {"versions": versions(), "commit": commit(), "hardware": hardware()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # optional, such as sglang
            continue
    return found


def commit() -> str | None:
    """Commit of the source tree, with `+changes` where files differ; None for an installed package."""
    source = Path(__file__).resolve().parents[2]
    head = _git(source, "rev-parse", "--short=12", "HEAD")
    if head is None or not (source / "pyproject.toml").exists():
        return None
    return head + ("+changes" if _git(source, "status", "--porcelain", "--untracked-files=no") else "")


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GiB, and the NVIDIA devices."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        **_gpus(),
    }


def _cpu_name() -> str:
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> dict[str, Any]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: a machine without a GPU
        return {"gpus": []}
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    gpus = [{"name": pynvml.nvmlDeviceGetName(h), "gib": _gib(h)} for h in handles]
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    return {"gpus": gpus, "driver": driver}


def _gib(handle: Any) -> float:
    return round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1)


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:  # git is not needed to train
        return None
    return done.stdout.strip() if done.returncode == 0 else None
