"""The plan of the configuration, for the checks that compare it with the machine."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context
from colocate_grpo.plan.assessment import Plan, make_plan


def planned(context: Context) -> Plan:
    """ConfigError where the configuration cannot be planned; the check's finding then says so."""
    return make_plan(context.required_config)
