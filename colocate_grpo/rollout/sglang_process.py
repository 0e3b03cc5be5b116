"""One SGLang server process: started with an allow-listed environment, waited for, and ended with all it started."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import psutil

from colocate_grpo import processes
from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.nvidia import runtime_libraries
from colocate_grpo.rollout.engine import EngineError
from colocate_grpo.rollout.sglang_cpu_platform import DEVICE_VARIABLE
from colocate_grpo.rollout.sglang_options import server_options, write_options

# No LD_PRELOAD, allocator, torchelastic, RANK or OMP variable of the trainer may reach an engine.
ALLOWED_ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV",
    "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip
ALLOWED_PREFIXES = ("SGLANG_", "NCCL_", "COLOCATE_")
END_GRACE_S = 3.0
LOG_TAIL_LINES = 25
LOG_TAIL_BYTES = 16384
LOGGED_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)
USAGE_ERROR = 2
SERVER_KEEP_ALIVE_S = 120  # longer than the client's: whoever reuses a closing connection loses its request
SERVER_ENVIRONMENT = {
    # Anyone may ask for /health, and a server that generates for it would touch memory that is asleep.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # log-probs are those of the distribution that was sampled
    "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
}


class ServerProcess:
    """The process tree of engine `index`, and where to reach it."""

    def __init__(self, config: Config, run_dir: Path, model_dir: Path, device: str, index: int, api_key: str):
        self.config, self.model_dir, self.device, self.index, self.api_key = config, model_dir, device, index, api_key
        self.log_path = run_dir / "logs" / f"engine_{index}.log"
        self.options_path = run_dir / "control" / f"engine_{index}.yaml"
        self.process: psutil.Popen | None = None
        self.port = 0
        self.tag = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spawn(self) -> None:
        """Start the server; returns at once. Its log is appended to, so that a restart keeps what went before."""
        self.port = free_port()
        for path in (self.log_path, self.options_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        options = server_options(self.config, self.model_dir, self.device, self.index, self.port, self.api_key)
        write_options(self.options_path, options)
        parent_tag = os.environ.get(processes.RUN_ID, f"untracked-{os.getpid()}")
        self.tag = f"{parent_tag}:engine_{self.index}:{secrets.token_hex(4)}"
        with self._open_log() as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "sglang.launch_server", "--config", str(self.options_path)],
                env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _open_log(self) -> BinaryIO:
        """For the owner's eyes: SGLang writes its options there, the key among them."""
        log = os.fdopen(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        os.fchmod(log.fileno(), 0o600)
        return log

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def wait_until(self, ready: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
        """Wait until `await ready()`; EngineError with the tail of the log when the server ends or time is up."""
        started = time.monotonic()
        while not await ready():
            if not self.is_alive():
                code = self.process.returncode if self.process else None
                if code == USAGE_ERROR:
                    raise ConfigError(f"rollout.sglang: {self.log_tail().splitlines()[-1]}")
                raise EngineError(
                    f"engine {self.index} ended with code {code} while it started{self.last_error()}{self.log_tail()}"
                )
            if time.monotonic() - started > deadline_s:
                raise EngineError(f"engine {self.index} did not start within {deadline_s:g} s{self.log_tail()}")
            await asyncio.sleep(0.2)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End everything that this server started; safe to call twice and on a server that is already gone."""
        if self.tag:
            processes.end(self.tag, grace_s=grace_s if self.is_alive() else 0.0)
        if self.process is not None:
            self.process.wait(timeout=10)
        self.options_path.unlink(missing_ok=True)

    def last_error(self) -> str:
        """The last exception in the end of the log, for the first line of a message."""
        found = LOGGED_ERROR.findall(self.log_tail())
        return f": {found[-1]}" if found else ""

    def log_tail(self) -> str:
        """The last lines of the log, whole and without the key, ready to end a message with."""
        if not self.log_path.exists():
            return "\n(it has no log)"
        with self.log_path.open("rb") as log:
            # One byte more than is shown: what follows the first newline is whole, wherever the cut falls.
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES - 1))
            is_cut = log.tell() > 0
            lines = log.read().decode(errors="replace").splitlines()
        whole = lines[1:] if is_cut else lines
        return "\n".join(["", f"the end of {self.log_path}:", *whole[-LOG_TAIL_LINES:]]).replace(self.api_key, "(key)")

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ALLOWED_ENVIRONMENT or k.startswith(ALLOWED_PREFIXES)}
        kept |= processes.tagged(self.tag)
        kept |= SERVER_ENVIRONMENT
        return kept | (self._cpu_environment() if self.device == "cpu" else _cuda_environment(kept))

    def _cpu_environment(self) -> dict[str, str]:
        """Each TP worker of each engine gets its share of the cores."""
        cores = sorted(os.sched_getaffinity(0))
        workers = self.config.rollout.tp * self.config.rollout.engines
        binding = "|".join(str(cores[rank % len(cores)]) for rank in range(self.config.rollout.tp))
        return {
            DEVICE_VARIABLE: "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(max(1, len(cores) // workers)),
            "SGLANG_CPU_OMP_THREADS_BIND": binding,  # SGLang wants one entry a worker, and binds only with AMX
        }


def _cuda_environment(kept: Mapping[str, str]) -> dict[str, str]:
    """Kernels are compiled at the first start, by programs beside this python; and SGLang preloads a library into its
    workers that needs CUDA's runtime, which only torch would find in the wheel that brought it."""
    libraries = [kept["LD_LIBRARY_PATH"]] if kept.get("LD_LIBRARY_PATH") else []
    libraries += [str(directory) for directory in runtime_libraries()]
    programs = [str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]
    return {"PATH": os.pathsep.join(programs), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def free_port() -> int:
    """A port that nothing listens on, found by binding."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
