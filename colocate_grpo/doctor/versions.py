"""Installed packages against the pinned set that is known to live together, and the NCCL inside torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from colocate_grpo.doctor.finding import Context, Finding, fail, ok

PACKAGE = "colocate-grpo"
# The first one whose communicators give their memory back (ProcessGroupNCCL.suspend).
OLDEST_NCCL = (2, 29, 7)


def check(context: Context) -> Finding:
    wanted = pins(needs_sglang=context.config is not None and context.config.rollout.engine == "sglang")
    wrong = [f"{name} {found or 'missing'} (pinned {pin})" for name, pin in wanted.items()
             if not _agrees(found := installed(name), pin)]  # fmt: skip
    if wrong:
        extra = "[sglang]" if "sglang" in wanted else ""
        return fail("; ".join(wrong), f"python -m pip install -e '.{extra}'")
    nccl = nccl_version()
    if context.wants_gpu and nccl < OLDEST_NCCL:
        return fail(
            f"NCCL {_dotted(nccl)} cannot suspend its communicators (needs {_dotted(OLDEST_NCCL)})",
            "reinstall torch with the NCCL it is pinned to: python -m pip install --force-reinstall torch",
        )
    return ok(", ".join(f"{name} {pin}" for name, pin in wanted.items()) + f", NCCL {_dotted(nccl)}")


def pins(needs_sglang: bool) -> dict[str, str]:
    """name -> exact version, from this package's own metadata."""
    found: dict[str, str] = {}
    for line in requires(PACKAGE) or []:
        requirement, _, marker = line.partition(";")
        name, equals, pin = requirement.strip().partition("==")
        if equals and (not marker or (needs_sglang and "sglang" in marker)):
            found[name] = pin
    return found


def nccl_version() -> tuple[int, ...]:
    """Version of the NCCL that torch loads; needs no card. (0,) where torch has none."""
    import torch

    return tuple(torch.cuda.nccl.version()) if torch.version.cuda else (0,)


def _dotted(version_: tuple[int, ...]) -> str:
    return ".".join(map(str, version_))


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # absence is what is asked about
        return None


def _agrees(found: str | None, pin: str) -> bool:
    return found is not None and found.split("+")[0] == pin
