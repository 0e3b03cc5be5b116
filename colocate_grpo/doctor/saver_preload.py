"""The library that SGLang preloads into its workers so that they can sleep: it needs CUDA's runtime and the driver."""

from __future__ import annotations

import importlib.util
import os
import subprocess

from colocate_grpo.doctor.finding import Context, Finding, fail, ok
from colocate_grpo.nvidia import runtime_libraries

STEM = "torch_memory_saver_hook_mode_preload"
TIMEOUT_S = 30.0
REINSTALL = "reinstall torch_memory_saver (python -m pip install --force-reinstall --no-deps torch_memory_saver)"
# Library -> how to get it.
MENDS = {
    "libcuda.so": "the driver brings it: install the driver, and in a container start it with the NVIDIA runtime",
    "libcudart.so": "reinstall torch's requirements (python -m pip install nvidia-cuda-runtime), or the CUDA toolkit",
}


def check(context: Context) -> Finding:
    if not context.wants_servers:
        return ok("not needed: no SGLang server on a card")
    if importlib.util.find_spec("torch_memory_saver") is None:
        return ok("torch_memory_saver is not installed (see versions)")
    from torch_memory_saver.utils import get_binary_path_from_package

    try:
        library = str(get_binary_path_from_package(STEM))
    except RuntimeError as error:  # a wheel without the build for this CUDA
        return fail(str(error).splitlines()[0], REINSTALL)
    problem = preload(library, context)
    if problem:
        return fail(f"{STEM} cannot be preloaded, so no engine would start: {problem}", _mend(problem))
    return ok("torch_memory_saver's library can be preloaded")


def preload(library: str, context: Context) -> str:
    """What the loader says of `library` in the environment that engines get; "" where it is content."""
    given = context.environment.get("LD_LIBRARY_PATH")
    paths = os.pathsep.join([*([given] if given else []), *map(str, runtime_libraries())])
    environment = {"LD_PRELOAD": library, "LD_LIBRARY_PATH": paths}
    done = subprocess.run(["/bin/true"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    # The loader goes on without a library that it cannot open, and says so.
    lines = done.stderr.strip().splitlines()
    return lines[0][:240] if lines else "" if done.returncode == 0 else f"exit code {done.returncode}"


def _mend(problem: str) -> str:
    return next((mend for library, mend in MENDS.items() if library in problem), REINSTALL)
