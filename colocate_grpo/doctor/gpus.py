"""Number and memory of the cards."""

from __future__ import annotations

from colocate_grpo.doctor.cards import by_number
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
    return _choice(context) or _lost(context) or _memory(context)


def _choice(context: Context) -> Finding | None:
    """Fewer cards than needed, or a choice that cannot be read."""
    given, found, needed = context.environment.get("CUDA_VISIBLE_DEVICES"), context.visible, context.cards_needed
    if not by_number(given or ""):
        return fail(
            f"CUDA_VISIBLE_DEVICES={given} does not give cards by number, and SGLang reads numbers only",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1,... (the numbers of `nvidia-smi -L`)",
        )
    if len(found) >= needed:
        return None
    if len(context.cards.cards) >= needed:
        return fail(
            f"CUDA_VISIBLE_DEVICES={given} leaves {len(found)} of {len(context.cards.cards)} cards, {needed} needed "
            "(parallel.tp x parallel.dp)",
            "unset CUDA_VISIBLE_DEVICES, or give as many numbers; or use a configuration for fewer cards",
        )
    return fail(
        f"{len(found)} cards, {needed} needed (parallel.tp x parallel.dp)",
        "use a configuration for fewer cards, or look for the missing one with `lspci | grep -i nvidia`",
    )


def _lost(context: Context) -> Finding | None:
    """Cards that do not answer. One that the run does not use is a warning: the next may be one that it does."""
    lost = [card for card in context.cards.cards if card.error]
    if not lost:
        return None
    what = "; ".join(f"card {card.index}: {card.error}" for card in lost)
    mend = "reboot; if it comes back, look at its power and riser cables and at `dmesg | grep -i xid`"
    wanted = context.visible[: context.cards_needed if context.config else None]
    return fail(what, mend) if any(card in wanted for card in lost) else warn(what, mend)


def _memory(context: Context) -> Finding:
    cards = context.used
    smallest = min(cards, key=lambda card: card.memory)
    planned = context.config.memory.gpu_gib if context.config else None
    names = f"{len(context.visible)} x {smallest.name}, {smallest.memory / GIB:.1f} GiB"
    # The driver reports a 24 GB card as 23.99 GiB or a little less.
    if planned and smallest.memory < (planned - 0.6) * GIB:
        return fail(
            f"{names} (card {smallest.index}), but memory.gpu_gib is {planned:g}",
            f"set memory.gpu_gib={smallest.memory / GIB:.1f} and run `plan`",
        )
    if len({card.name for card in cards}) > 1:
        # CUDA's own order has the fastest card first, nvidia-smi's follows the slots.
        return warn(
            f"{names}; the cards differ",
            "the slowest card sets the pace of every step; export CUDA_DEVICE_ORDER=PCI_BUS_ID to number them "
            "as nvidia-smi does",
        )
    return ok(names)
