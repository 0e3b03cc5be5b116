"""Does systemd end this user's processes at logout? A run in tmux would end with the SSH session."""

from __future__ import annotations

import configparser
import getpass
import subprocess
from pathlib import Path

from colocate_grpo.doctor.finding import Context, Finding, ok, warn

LOGIND = (Path("/etc/systemd/logind.conf"), Path("/etc/systemd/logind.conf.d"))


def check(context: Context) -> Finding:
    lingers = user_lingers()
    if lingers is None:
        return ok("no systemd-logind here")
    kills = kill_user_processes(LOGIND)
    mend = f"loginctl enable-linger {getpass.getuser()}"
    if kills and not lingers:
        return warn("systemd ends your processes at logout (KillUserProcesses=yes, no lingering)", mend)
    if not lingers:
        return warn("no lingering: a systemd user unit ends at logout (tmux survives)", mend)
    return ok("lingering is on")


def user_lingers() -> bool | None:
    """None where there is no logind to ask."""
    command = ["loginctl", "show-user", getpass.getuser(), "--property=Linger", "--value"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):  # no systemd, or one that does not answer
        return None
    return done.stdout.strip() == "yes" if done.returncode == 0 else None


def kill_user_processes(places: tuple[Path, ...]) -> bool:
    files = [file for place in places for file in (sorted(place.glob("*.conf")) if place.is_dir() else [place])]
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(file for file in files if file.is_file())
    return parser.getboolean("Login", "KillUserProcesses", fallback=False)
