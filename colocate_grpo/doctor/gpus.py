"""Number and memory of the cards."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

GIB = 2**30


def check(context: Context) -> Finding:
    found, needed = context.cards, context.cards_needed
    if not context.wants_gpu:
        return ok("this configuration runs on the CPU")
    if not found.cards:
        return fail(
            f"no NVIDIA card ({found.error or 'NVML counts none'}), {needed} needed",
            "install the driver (https://www.nvidia.com/drivers) and check nvidia-smi; on a CPU use run.device=cpu",
        )
    if len(found.cards) < needed:
        return fail(
            f"{len(found.cards)} cards, {needed} needed (parallel.tp x parallel.dp)",
            "use a configuration for fewer cards, or look for the missing one with `lspci | grep -i nvidia`",
        )
    return _memory(context)


def _memory(context: Context) -> Finding:
    cards = context.cards.cards[: max(context.cards_needed, 1)]
    smallest = min(cards, key=lambda card: card.memory)
    planned = context.config.memory.gpu_gib if context.config else None
    names = f"{len(context.cards.cards)} x {smallest.name}, {smallest.memory / GIB:.1f} GiB"
    # The driver reports a 24 GB card as 23.99 GiB or a little less.
    if planned and smallest.memory < (planned - 0.6) * GIB:
        return fail(
            f"{names} (card {smallest.index}), but memory.gpu_gib is {planned:g}",
            f"set memory.gpu_gib={smallest.memory / GIB:.1f} and run `plan`",
        )
    if len({card.name for card in cards}) > 1:
        return warn(f"{names}; the cards differ", "the slowest card sets the pace of every step")
    return ok(names)
