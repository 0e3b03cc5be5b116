"""Each check of the machine can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from machine import Nvml, context

from colocate_grpo import processes
from colocate_grpo.doctor import (
    allocator,
    c_extension,
    caches,
    host_memory,
    limits,
    lingering,
    orphans,
    ports,
    shared_memory,
    triton_kernel,
    versions,
)
from colocate_grpo.doctor.finding import Context


def test_two_allocator_settings_or_expandable_segments_fail() -> None:
    assert allocator.check(context()).level == "ok"
    both = {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}
    assert allocator.check(context(environment=both)).level == "fail"
    for name in both:
        expandable = {name: "expandable_segments: True"}
        assert allocator.check(context(environment=expandable)).level == "fail"
        assert allocator.check(context(environment=expandable, memory={"expandable_segments": True})).level == "ok"


def test_c_extension_really_compiles_and_a_missing_compiler_or_header_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert c_extension.check(Context(environment=os.environ)).level == "ok"
    assert "no C compiler" in c_extension.check(Context(environment={"PATH": str(tmp_path)})).what
    monkeypatch.setattr(c_extension.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    finding = c_extension.check(Context(environment=os.environ))
    assert finding.level == "fail"
    assert "Python.h" in finding.what


def test_triton_compiles_without_a_card_and_a_broken_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "TIMEOUT_S", 500.0)  # how fast this machine is, is no question here
    finding = triton_kernel.check(Context(nvml=Nvml(), environment=os.environ))
    assert finding.level == "ok"
    assert "no card to launch it on" in finding.what
    monkeypatch.setattr(triton_kernel.sys, "executable", "/bin/false")
    assert triton_kernel.check(Context(nvml=Nvml(), environment=os.environ)).level == "fail"


def test_caches_in_tmp_are_warned_about() -> None:
    home = {"HOME": "/home/somebody", "TORCHINDUCTOR_CACHE_DIR": "/home/somebody/inductor"}
    assert caches.check(context(environment=home)).level == "ok"
    finding = caches.check(context(environment={**home, "TRITON_CACHE_DIR": "/tmp/triton"}))
    assert finding.level == "warn"
    assert "TRITON_CACHE_DIR" in finding.what
    assert caches.check(context(environment={"HOME": "/home/somebody"})).level == "warn"


def test_versions_against_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.check(context()).level == "ok"
    assert "sglang" not in versions.pins(needs_sglang=False)
    assert versions.pins(needs_sglang=True)["sglang"]
    monkeypatch.setattr(versions, "installed", lambda name: "0.1" if name == "torch" else versions.pins(True)[name])
    finding = versions.check(context())
    assert finding.level == "fail"
    assert "torch 0.1" in finding.what


def test_nccl_that_cannot_suspend_fails_on_cards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "nccl_version", lambda: (2, 28, 3))
    assert "2.28.3" in versions.check(context(Nvml(cards=1))).what
    assert versions.check(context(run={"device": "cpu"})).level == "ok"


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine_of(gib: float) -> None:
        memory = psutil.virtual_memory()._replace(total=int(gib * 2**30), available=int(gib * 0.9 * 2**30))
        monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)

    machine_of(512)
    assert host_memory.check(context(Nvml(cards=1))).level == "ok"
    machine_of(4)
    assert host_memory.check(context(Nvml(cards=1))).level == "fail"
    finding = host_memory.check(context(Nvml(cards=1), memory={"backup_dir": "/mnt/fast"}))
    assert "(save)" in finding.what
    assert "backup_dir" not in finding.how_to_mend


def test_a_containers_shared_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def statvfs(path: Path) -> os.statvfs_result:
        blocks = 64 * 2**20 // 4096
        return os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))

    missing = Context(shared_memory=tmp_path / "nowhere", nvml=Nvml())
    assert shared_memory.check(missing).level == "fail"
    monkeypatch.setattr(shared_memory.os, "statvfs", statvfs)
    finding = shared_memory.check(Context(shared_memory=tmp_path, nvml=Nvml()))
    assert finding.level == "fail"
    assert "--shm-size" in finding.how_to_mend


@pytest.mark.parametrize(
    ("files", "hard", "level"), [(256, 4096, "fail"), (4096, 4096, "warn"), (1024, 1_000_000, "ok")]
)
def test_limits(monkeypatch: pytest.MonkeyPatch, files: int, hard: int, level: str) -> None:
    answers = {limits.resource.RLIMIT_NOFILE: (files, hard), limits.resource.RLIMIT_NPROC: (100_000, 100_000)}
    monkeypatch.setattr(limits.resource, "getrlimit", answers.__getitem__)
    assert limits.check(context()).level == level


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ports.check(context()).level == "ok"

    def refuse(*args: object) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(ports.socket, "socket", refuse)
    assert ports.check(context()).level == "fail"


def test_lingering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for answer, level in ((None, "ok"), (True, "ok"), (False, "warn")):
        monkeypatch.setattr(lingering, "user_lingers", lambda answer=answer: answer)
        assert lingering.check(context()).level == level
    (tmp_path / "logind.conf").write_text("[Login]\nKillUserProcesses=yes\n")
    assert lingering.kill_user_processes((tmp_path / "logind.conf",))
    (tmp_path / "logind.conf").write_text("[Login]\n#KillUserProcesses=yes\n")
    assert not lingering.kill_user_processes((tmp_path / "logind.conf",))


def test_orphan_of_a_dead_driver_is_found_and_a_child_of_a_living_one_is_not(tmp_path: Path) -> None:
    ticks = processes.start_ticks(os.getpid())
    assert ticks is not None
    living = f"{processes.driver_id(tmp_path)}:engine_0:abc"
    dead = f"run:{os.getpid()}:{ticks - 1000}:engine_0:abc"
    for tag, is_orphan in ((living, False), (dead, True)):
        environment = {**os.environ, **processes.tagged(tag)}
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            child.stdout.readline()  # before that, /proc may not show its environment yet
            assert (child.pid in [p.pid for p in orphans.find_orphans()]) == is_orphan
        finally:
            child.communicate(b"\n")


def test_a_clock_that_is_set_makes_no_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start times by the clock follow the time of the boot, which every step of the clock moves."""
    tag = processes.driver_id(tmp_path)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)
    assert orphans.driver_runs(tag)


@pytest.mark.parametrize("tag", ["run", "run:driver", "run:1:1700000000.25:engine_0"])
def test_a_tag_without_a_driver_proves_nothing(tag: str) -> None:
    assert orphans.driver_runs(tag)


def test_start_in_ticks_of_a_name_with_spaces_and_parentheses(tmp_path: Path) -> None:
    odd = tmp_path / "a) (b 1 2"
    odd.symlink_to(sys.executable)
    with subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        mine, its = processes.start_ticks(os.getpid()), processes.start_ticks(child.pid)
        assert mine is not None
        assert its is not None
        assert its >= mine
        child.stdin.write(b"\n")
