"""The directory of a run as its driver and the other commands see it: lock, configuration, attempts, control files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from colocate_grpo.checkpoint.files import read_object, write_json
from colocate_grpo.config import Config
from colocate_grpo.config_file import changes, dump_config, load_config
from colocate_grpo.disk_full import best_effort
from colocate_grpo.errors import ConfigError, DataError
from colocate_grpo.observe.state import read_state

CONFIG = "config.yaml"
LOCK = "lock"
OWN_NAMES = {CONFIG, f".{CONFIG}.partial", LOCK, "logs", "attempts", "control", "report", "plan.txt", "doctor.txt"}
TAIL_LINES = 40
TORCHRUN_REPORT = re.compile(r"^E\d{4} [^\n]*torch/distributed/elastic", re.MULTILINE)
LOCK_PATIENCE_S = 0.5


class _Attempt(BaseModel):
    model_config = ConfigDict(strict=True)
    started: float | None = None
    ended: float | None = None
    kind: str | None = None
    message: str | None = None


class _ExitReport(BaseModel):
    model_config = ConfigDict(strict=True)
    kind: str
    message: str = ""
    step: int = -1


class _StopRequest(BaseModel):
    model_config = ConfigDict(strict=True)
    reason: str


class RunDirectory:
    """Paths and small files of one run; reading needs no lock."""

    def __init__(self, path: Path):
        self.path = Path(path)

    # Being the only driver

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run; ConfigError names the process that has it. The kernel lets go when the holder dies."""
        self._check_place()
        with self._lock_file() as file:
            if not _lock(file):
                raise ConfigError(
                    f"run.dir: {self.path} is already running (process {self.holder()}); "
                    f"look at it with `colocate-grpo status {self.path}`, end it with `colocate-grpo stop {self.path}`"
                )
            file.truncate(0)
            with best_effort("the holder's name"):
                os.write(file.fileno(), f"{os.getpid()} on {socket.gethostname()}".encode())
            yield

    def is_running(self) -> bool:
        """Whether a driver holds the run at this moment."""
        if not (self.path / LOCK).exists():
            return False
        with (self.path / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def holder(self) -> str:
        """`PID on HOST` of the present or last driver."""
        return (self.path / LOCK).read_text().strip() or "unknown"

    def require(self) -> RunDirectory:
        """Itself; DataError where this is no run directory."""
        if not (self.path / CONFIG).is_file():
            raise DataError(f"{self.path}: no run directory (it has no {CONFIG})")
        return self

    # Configuration

    def adopt(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Write the configuration, unless it makes another run; returns the resumable options that changed."""
        resumable: dict[str, tuple[Any, Any]] = {}
        if self._has_config():
            identity, resumable = changes(self.config(), config)
            if identity:
                keys = ", ".join(f"{key} (is {old!r}, asked for {new!r})" for key, (old, new) in identity.items())
                raise ConfigError(
                    f"run.dir: {self.path} holds another run; these options may not change: {keys}; "
                    "set them back, or choose another run.name or run.dir"
                )
        dump_config(config, self.path / CONFIG)
        return resumable

    def config(self) -> Config:
        """The configuration the run was last started with."""
        return load_config(self.path / CONFIG)

    def _has_config(self) -> bool:
        """Whether there is a configuration; a power cut may have left an empty file of one that was not synced."""
        path = self.path / CONFIG
        return path.exists() and path.stat().st_size > 0

    # Attempts

    def log(self, attempt: int) -> Path:
        """Output of an attempt's ranks."""
        return self.path / "logs" / f"attempt_{attempt}.log"

    def last_attempt(self) -> int:
        """Number of the latest attempt, 0 before the first."""
        numbers = [int(m[1]) for p in self.path.glob("attempts/*.json") if (m := re.fullmatch(r"(\d+)\.json", p.name))]
        return max(numbers, default=0)

    def record_attempt(self, attempt: int, **values: Any) -> None:
        """Update what is known about an attempt: its start, its end, and why."""
        write_json(self.path / "attempts" / f"{attempt}.json", {**self.attempt(attempt), **values})

    def attempt(self, attempt: int) -> dict[str, Any]:
        """What the driver recorded about an attempt; empty where nothing readable is there."""
        return read_object(self.path / "attempts" / f"{attempt}.json", _Attempt)

    def exit_report(self, attempt: int) -> dict[str, Any] | None:
        """What the loop itself said about its end: kind, message, step; None if it could not say anything."""
        return read_object(self.path / "attempts" / f"{attempt}.exit.json", _ExitReport) or None

    def state(self) -> dict[str, Any]:
        """The last state.json; empty before the first."""
        return read_state(self.path)

    def log_tail(self, attempt: int, lines: int = TAIL_LINES) -> str:
        """The last lines that the ranks of an attempt have written; torchrun's own account of their end is left out."""
        path = self.log(attempt)
        text = TORCHRUN_REPORT.split(tail(path))[0] if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    # Control

    def ask_to_stop(self, reason: str) -> None:
        """Let the loop stop cleanly as soon as it can; the reason is for whoever reads the file."""
        (self.path / "control").mkdir(exist_ok=True)
        (self.path / "control" / "stop").write_text(json.dumps({"reason": reason, "time": time.time()}))

    def stop_reason(self) -> str | None:
        """Why the run was asked to stop; None if it was not."""
        path = self.path / "control" / "stop"
        if not path.exists():
            return None
        return read_object(path, _StopRequest).get("reason", "the file control/stop")

    def clear_stop(self) -> None:
        """Forget an earlier request to stop."""
        (self.path / "control" / "stop").unlink(missing_ok=True)

    def _lock_file(self) -> IO[str]:
        try:
            for name in ("logs", "attempts", "control", "checkpoints"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            return (self.path / LOCK).open("a+")
        except OSError as error:  # a place of the user's choice, which may be read-only, full, or below a file
            raise ConfigError(f"run.dir: {self.path} cannot be written ({error.strerror})") from error

    def _check_place(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"run.dir: {self.path} is no directory")
        names = {path.name for path in self.path.iterdir()}
        if names and CONFIG not in names and not names <= OWN_NAMES | {"checkpoints"}:
            raise ConfigError(f"run.dir: {self.path} is not empty and is no run directory (it has no {CONFIG})")


def _lock(file: IO[str]) -> bool:
    """Take the lock; patient for a moment, because whoever asks whether it is held holds it for an instant."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_PATIENCE_S / 10)


def tail(path: Path, size: int = 64 << 10) -> str:
    """The last `size` bytes of a text file."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read().decode(errors="replace")
