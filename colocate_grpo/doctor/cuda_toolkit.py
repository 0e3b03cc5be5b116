"""The CUDA toolkit: FlashInfer and SGLang compile kernels at the first start, and link them with CUDA's libraries.

Found as FlashInfer finds it: CUDA_HOME, CUDA_PATH, the nvcc in PATH, /usr/local/cuda.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

DEFAULT_HOME = Path("/usr/local/cuda")
MEND = "install the CUDA toolkit of NVIDIA (apt install cuda-toolkit-13-0) and export CUDA_HOME=/usr/local/cuda"
TIMEOUT_S = 60.0


def check(context: Context) -> Finding:
    if not context.wants_servers:
        return ok("not needed: no SGLang server on a card")
    home = toolkit(context)
    nvcc = home / "bin" / "nvcc"
    if not shutil.which(nvcc):
        return fail(f"no CUDA toolkit: {nvcc} is no program, and kernels are compiled at the first start", MEND)
    told = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=TIMEOUT_S)
    release = re.search(r"release (\d+)\.(\d+)", told.stdout)
    if told.returncode or release is None:
        return fail(f"{nvcc} does not work: {_last_line(told.stderr or told.stdout)}", MEND)
    problem = _link(home, context)
    if problem:
        return fail(f"{home}: its libraries do not link: {problem}", MEND)
    return _compare(home, release[1], f"{release[1]}.{release[2]}")


def toolkit(context: Context) -> Path:
    """Where FlashInfer looks."""
    given = context.environment.get("CUDA_HOME") or context.environment.get("CUDA_PATH")
    if given:
        return Path(given)
    nvcc = shutil.which("nvcc", path=context.environment.get("PATH", ""))
    return Path(nvcc).parent.parent if nvcc else DEFAULT_HOME


def _link(home: Path, context: Context) -> str:
    """What the linker says of an empty library linked as FlashInfer links its own; "" where it is content."""
    compiler = shutil.which("c++", path=context.environment.get("PATH", ""))
    if compiler is None:
        return "there is no c++ in PATH"
    with tempfile.TemporaryDirectory() as directory:
        command = [compiler, "-shared", "-x", "c++", "-", "-o", str(Path(directory) / "probe.so")]
        command += [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=TIMEOUT_S)
    missing = re.findall(r"cannot find (-l\w+)", done.stderr)
    return "" if done.returncode == 0 else f"cannot find {', '.join(missing)}" if missing else _last_line(done.stderr)


def _compare(home: Path, major: str, version: str) -> Finding:
    import torch

    built_for = torch.version.cuda or ""
    if built_for and built_for.split(".")[0] != major:
        return warn(
            f"{home} is CUDA {version}, torch {torch.__version__} is built for {built_for}",
            f"install the toolkit of CUDA {built_for.split('.')[0]} and point CUDA_HOME at it",
        )
    return ok(f"{home}: CUDA {version} compiles and links")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no answer"])[-1][:160]
