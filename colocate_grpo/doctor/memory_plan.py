"""Does the configuration fit the cards?"""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.errors import UserError
from colocate_grpo.hub import HubUnreachable
from colocate_grpo.plan.advice import as_overrides, suggest


def check(context: Context) -> Finding:
    plan = context.plan
    if isinstance(plan, HubUnreachable):
        return warn(f"shape unknown until download: {plan}", "run `plan` once the hub can be reached")
    if isinstance(plan, UserError):
        return fail(str(plan), "correct the configuration")
    if not context.wants_gpu:
        return ok("no card to fit on")
    if not plan.fits:
        changes = [as_overrides(change) for change in suggest(plan)]
        return fail("; ".join(plan.memory.problems()), f"fits with: {' | or '.join(changes) or 'a smaller model'}")
    fullest = max(plan.memory.table, key=plan.memory.total)
    return ok(f"fits; fullest phase {fullest}: {plan.memory.total(fullest) / 2**30:.1f} GiB a card")
