"""What a first start of SGLang on a card needs beside packages: toolkit, ninja, and a library that can be preloaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from machine import Nvml, context

from colocate_grpo.doctor import cuda_toolkit, ninja, saver_preload
from colocate_grpo.doctor.finding import Context, Finding

NOWHERE_ELSE = "libcudart.so.doctor-test"
MAJOR = (torch.version.cuda or "13.0").split(".")[0]


def machine(**environment: str) -> Context:
    return context(Nvml(cards=1), {"PATH": os.environ["PATH"], **environment}, rollout={"engine": "sglang"})


def library(path: Path, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", str(path), *options], input=b"", check=True)
    return path


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("check", [cuda_toolkit.check, ninja.check, saver_preload.check])
def test_needed_for_servers_on_cards_only(check) -> None:
    nothing = {"PATH": "/nowhere"}
    for machine_without in (
        context(Nvml(), nothing, run={"device": "cpu"}, rollout={"engine": "sglang"}),
        context(Nvml(cards=1), nothing, rollout={"engine": "embedded"}),
    ):
        assert check(machine_without).level == "ok"
        assert "not needed" in check(machine_without).what


def toolkit_finding(home: Path) -> Finding:
    return cuda_toolkit.check(machine(CUDA_HOME=str(home)))


def test_toolkit_is_missing_then_broken_then_half_then_whole_then_of_another_cuda(tmp_path: Path) -> None:
    assert "no CUDA toolkit" in toolkit_finding(tmp_path).what
    nvcc = script(tmp_path / "bin" / "nvcc", "exit 1")
    assert "does not work" in toolkit_finding(tmp_path).what
    script(nvcc, f"echo 'Cuda compilation tools, release {MAJOR}.0, V{MAJOR}.0.1'")
    library(tmp_path / "lib64" / "stubs" / "libcuda.so")
    assert "cannot find -lcudart" in toolkit_finding(tmp_path).what
    library(tmp_path / "lib64" / "libcudart.so")
    assert toolkit_finding(tmp_path).level == "ok"
    script(nvcc, "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    assert toolkit_finding(tmp_path).level == "warn"


def test_toolkit_of_the_nvcc_in_the_path(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "nvcc", "true")
    assert cuda_toolkit.toolkit(context(environment={"PATH": str(tmp_path / "bin")})) == tmp_path
    assert cuda_toolkit.toolkit(context(environment={"PATH": "/nowhere"})) == cuda_toolkit.DEFAULT_HOME


def test_ninja_beside_this_python_or_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ninja.sys, "executable", str(tmp_path / "venv" / "python"))
    elsewhere = {"PATH": str(tmp_path / "elsewhere")}
    assert ninja.check(machine(**elsewhere)).level == "fail"
    script(tmp_path / "elsewhere" / "ninja", "exit 3")
    assert "does not work: exit code 3" in ninja.check(machine(**elsewhere)).what
    script(tmp_path / "venv" / "ninja", "echo 1.13")
    assert ninja.check(machine(**elsewhere)).what == f"{tmp_path / 'venv' / 'ninja'} 1.13"


def test_a_preloaded_library_needs_its_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's runtime is in the directory of torch's requirements alone."""
    runtime = tmp_path / "wheel"
    needed = library(runtime / NOWHERE_ELSE, f"-Wl,-soname,{NOWHERE_ELSE}")
    hook = library(tmp_path / "hook.so", "-x", "none", "-Wl,--no-as-needed", str(needed))
    monkeypatch.setattr("torch_memory_saver.utils.get_binary_path_from_package", lambda stem: hook)
    monkeypatch.setattr(saver_preload, "runtime_libraries", list)
    finding = saver_preload.check(machine())
    assert finding.level == "fail"
    assert NOWHERE_ELSE in finding.what
    assert finding.how_to_mend == saver_preload.MENDS["libcudart.so"]
    monkeypatch.setattr(saver_preload, "runtime_libraries", lambda: [runtime])
    assert saver_preload.check(machine(LD_LIBRARY_PATH="/elsewhere")).level == "ok"
    hook.unlink()
    assert saver_preload.check(machine()).level == "fail"
