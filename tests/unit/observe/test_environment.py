"""What is recorded of versions, source and hardware is what the machine says."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess

from colocate_grpo.observe.environment import environment


def test_the_environment_is_that_of_this_machine() -> None:
    found = environment()
    json.dumps(found)
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["hardware"]["cores"] == len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        total_kib = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    assert abs(found["hardware"]["ram_gib"] - total_kib / 2**20) < 0.1


def test_the_commit_is_the_head_of_the_source_tree() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__))
    commit = environment()["commit"]
    if head.returncode:  # an unpacked archive has no history
        assert commit is None
    else:
        assert head.stdout.startswith(commit.removesuffix("+changes"))
