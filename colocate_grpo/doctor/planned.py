"""The plan of the configuration, for the checks that compare it with the machine."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, ok
from colocate_grpo.plan.assessment import Plan


def planned(context: Context) -> Plan | None:
    """None where the configuration cannot be planned: `memory_plan` says why."""
    plan = context.plan
    return plan if isinstance(plan, Plan) else None


def without_plan(what: str) -> Finding:
    """What a check finds that has no plan to compare with."""
    return ok(f"{what}; not compared with the plan: there is none (see memory_plan)")
