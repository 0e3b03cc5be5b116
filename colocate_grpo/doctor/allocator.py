"""The CUDA allocator's settings, which torch reads under two names."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, fail, ok

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:true"


def check(context: Context) -> Finding:
    given = {name: context.environment[name] for name in NAMES if context.environment.get(name)}
    if len(set(given.values())) > 1:
        return fail(f"two different settings: {given}", f"unset {NAMES[0]} and keep {NAMES[1]}")
    wanted = context.config is not None and context.config.memory.expandable_segments
    asked = any(EXPANDABLE in value.replace(" ", "").lower() for value in given.values())
    if asked and not wanted:
        return fail(
            f"{next(iter(given))} asks for expandable segments, which torch_memory_saver refuses",
            f"unset {' '.join(given)}; the run sets what it needs (memory.expandable_segments)",
        )
    return ok(f"{given}" if given else "no allocator variable is set")
