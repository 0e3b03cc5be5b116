"""The NVIDIA driver against the CUDA version that the installed torch was built for."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

# CUDA major version -> oldest driver branch that runs it (CUDA release notes, minor version compatibility).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def check(context: Context) -> Finding:
    import torch

    built_for = torch.version.cuda
    if not context.wants_gpu:
        return ok("no driver needed on the CPU")
    if built_for is None:
        return fail(f"torch {torch.__version__} is a CPU build", "install the CUDA build of torch (launch/ does it)")
    needed = OLDEST_DRIVER.get(int(built_for.split(".")[0]))
    if context.cards.error:
        return fail(f"no driver; torch {torch.__version__} needs {needed or 'one for CUDA ' + built_for}",
                    f"install driver {needed} or newer and reboot")  # fmt: skip
    branch = context.cards.driver.split(".")[0]
    if not branch.isdigit():
        return warn(
            f"the driver does not tell its version ({context.cards.driver or 'no answer'})",
            f"see that `nvidia-smi` says {needed or 'a driver for CUDA ' + built_for} or newer",
        )
    if needed is None:
        return warn(f"driver {context.cards.driver}, CUDA {built_for}: not known here", "check NVIDIA's release notes")
    if int(branch) < needed:
        return fail(
            f"driver {context.cards.driver} is too old: torch {torch.__version__} is built for CUDA {built_for}, "
            f"which needs {needed} or newer",
            f"install driver {needed} or newer (for example `apt install nvidia-driver-{needed}`) and reboot",
        )
    return ok(f"driver {context.cards.driver} runs CUDA {built_for} (needs {needed})")
