"""ninja, which builds the kernels that are compiled at the first start: beside this Python, or in PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from colocate_grpo.doctor.finding import Context, Finding, fail, ok

MEND = f"{sys.executable} -m pip install ninja"
TIMEOUT_S = 30.0


def check(context: Context) -> Finding:
    if not context.wants_servers:
        return ok("not needed: no SGLang server on a card")
    # An engine's PATH begins with the directory of this Python.
    places = os.pathsep.join([str(Path(sys.executable).parent), context.environment.get("PATH", "")])
    found = shutil.which("ninja", path=places)
    if found is None:
        return fail(f"no ninja in {Path(sys.executable).parent} or PATH; engines build kernels with it", MEND)
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        return fail(f"{found} does not work: exit code {done.returncode}", MEND)
    return ok(f"{found} {done.stdout.strip()}")
