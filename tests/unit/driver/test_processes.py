"""A run's processes, found and ended across sessions, stopped states and scrubbed environments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from colocate_grpo import processes, stacks

SLEEP = "import time; time.sleep(300)"
SCRUBBING_PARENT = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env={{}}).pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def tag(tmp_path: Path) -> Iterator[str]:
    tag = processes.run_id(tmp_path)
    yield tag
    processes.end(tag, 0)


def start(tag: str | None, code: str = SLEEP, **options: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **(processes.tagged(tag) if tag else {})}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **options)  # type: ignore[call-overload, no-any-return]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tags_of_a_run_and_of_its_drivers(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert processes.run_id(tmp_path) == processes.run_id(tmp_path / "link")
    assert processes.run_id(tmp_path) != processes.run_id(tmp_path / "other")
    assert processes.driver_id(tmp_path).startswith(processes.run_id(tmp_path) + f":{os.getpid()}:")


def test_every_kind_of_process_is_ended(tag: str) -> None:
    own_session = start(f"{tag}:1:1", start_new_session=True)
    deaf = start(tag, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEP}",
                 stdout=subprocess.PIPE)  # fmt: skip
    stopped = start(tag)
    stopped.send_signal(signal.SIGSTOP)
    parent = start(tag, SCRUBBING_PARENT, stdout=subprocess.PIPE)
    titled = start(tag, f"import setproctitle; setproctitle.setproctitle('a title ' * 20); print(flush=True); {SLEEP}",
                   stdout=subprocess.PIPE)  # fmt: skip
    for process in (deaf, titled):
        assert process.stdout is not None
        process.stdout.readline()
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    stranger = start(None)
    other_run = start(f"{tag}0")
    expected = {own_session.pid, deaf.pid, stopped.pid, parent.pid, titled.pid, grandchild}
    assert {p.pid for p in processes.find(tag)} == expected
    assert {p.pid for p in processes.find(f"{tag}:1:1")} == {own_session.pid}
    assert {p.pid for p in processes.end(tag, grace_s=0.3)} == expected
    assert processes.find(tag) == []
    assert own_session.wait(10) == -signal.SIGTERM
    assert deaf.wait(10) == stopped.wait(10) == -signal.SIGKILL
    for innocent in (stranger, other_run):
        assert innocent.poll() is None
        innocent.kill()
        innocent.wait()


def test_the_guard_ends_what_a_killed_process_leaves(tag: str, tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
from pathlib import Path
from colocate_grpo import processes
with processes.lifeline({tag!r}, Path({str(tmp_path / "log")!r})):
    environment = {{**os.environ, **processes.tagged({tag!r})}}
    subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env=environment, start_new_session=True)
    print(flush=True)
    time.sleep(300)
"""
    driver = start(None, code, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    driver.stdout.readline()
    wait_for(lambda: len(processes.find(tag)) == 1)  # in the midst of its exec a process shows no environment
    driver.kill()
    driver.wait()
    wait_for(lambda: not processes.find(tag))
    wait_for(lambda: "ended 1 processes" in (tmp_path / "log").read_text())


def test_only_processes_with_a_handler_are_asked_for_stacks(tag: str, tmp_path: Path) -> None:
    """And each answers in a file of its own, whole, while the others answer too."""
    register = "from colocate_grpo import stacks; from pathlib import Path; "
    register += f"stacks.write_when_asked(Path({str(tmp_path)!r})); "
    ready = [start(tag, f"{register}print(flush=True); {SLEEP}", stdout=subprocess.PIPE) for _ in range(3)]
    plain = start(tag)
    for process in ready:
        assert process.stdout is not None
        process.stdout.readline()
    text = stacks.collect(psutil.Process(), tmp_path)
    for process in ready:
        own = text.partition(f"process {process.pid}:")[2].partition("process ")[0]
        assert "most recent call first" in own
        assert 'File "<string>", line 1' in own
        assert process.poll() is None
    assert plain.poll() is None, "a process without a handler would have been ended by the signal"
