"""Other processes on the cards of the run: they take memory that the plan counts on."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn

MIB = 2**20
# A desktop session takes a few hundred MiB; the plan does not count it.
DISPLAY_LIMIT = 256 * MIB


def check(context: Context) -> Finding:
    cards = context.used
    if not cards:
        return ok("no card, so nothing runs on one")
    busy = [(card.index, pid, used) for card in cards for pid, used in card.processes or []]
    if busy:
        shown = ", ".join(f"card {index}: process {pid} ({used // MIB} MiB)" for index, pid, used in busy[:4])
        return fail(
            f"{len(busy)} other processes compute on the cards: {shown}",
            "end them (an earlier run's: `colocate-grpo stop RUN_DIR`)",
        )
    taken = [card for card in cards if card.used > DISPLAY_LIMIT + 512 * MIB]
    if taken:
        shown = ", ".join(f"card {card.index}: {card.used // MIB} MiB" for card in taken)
        return warn(
            f"memory is in use without a computing process ({shown})", "a desktop session? use a card without a display"
        )
    if any(card.processes is None for card in cards):
        return ok("little memory is in use; this driver does not list processes (WSL2, virtual cards)")
    return ok("no other process on the cards")
