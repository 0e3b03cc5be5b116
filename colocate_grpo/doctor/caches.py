"""Where compilers and hubs keep their caches: /tmp is emptied at a reboot, and small in a container."""

from __future__ import annotations

import tempfile
from pathlib import Path

from colocate_grpo.doctor.finding import Context, Finding, ok, warn

# Variable -> where the library puts its cache without it ({home}; None: under the temporary directory).
DEFAULTS = {
    "TRITON_CACHE_DIR": "{home}/.triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": None,
    "TORCH_EXTENSIONS_DIR": "{home}/.cache/torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "{home}",
    "HF_HOME": "{home}/.cache/huggingface",
    "MODELSCOPE_CACHE": "{home}/.cache/modelscope",
}


def check(context: Context) -> Finding:
    home = context.environment.get("HOME", "")
    inside = [name for name, default in DEFAULTS.items() if _in_temporary(_place(name, default, home, context))]
    if inside:
        target = f"{home or '~'}/.cache/colocate_grpo"
        return warn(
            f"caches under a temporary directory: {', '.join(inside)}",
            "export " + " ".join(f"{name}={target}/{name.lower()}" for name in inside),
        )
    return ok("all caches outlive a reboot")


def _place(name: str, default: str | None, home: str, context: Context) -> Path:
    given = context.environment.get(name)
    return Path(given or (default.format(home=home) if default and home else tempfile.gettempdir()))


def _in_temporary(path: Path) -> bool:
    temporary = {Path("/tmp"), Path("/var/tmp"), Path(tempfile.gettempdir())}
    return any(path.absolute().is_relative_to(root) for root in temporary)
