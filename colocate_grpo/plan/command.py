"""`colocate-grpo plan`."""

from __future__ import annotations

import json

from rich.console import Console

from colocate_grpo.config import Config
from colocate_grpo.plan import comparison
from colocate_grpo.plan.advice import as_overrides, suggest
from colocate_grpo.plan.assessment import as_json, make_plan
from colocate_grpo.plan.hardware import Assumptions, runs_on_gpu, smallest_card
from colocate_grpo.plan.table import print_comparison, print_plan, print_verdict
from colocate_grpo.preflight import check_engine_options


def run_plan(config: Config, *, json_out: bool, compare: bool) -> int:
    """Print the plan; 0 when it fits, 1 when it does not. `compare` adds a table of alternatives."""
    check_engine_options(config)
    assumed = Assumptions()
    plan = make_plan(config, assumed, smallest_card(config) if runs_on_gpu(config) else None)
    advice = [] if plan.fits else suggest(plan)
    if json_out:
        values = as_json(plan) | {"fits_with": [as_overrides(change) for change in advice]}
        if compare:
            values["alternatives"] = {
                row.name: as_json(row.plan) if row.plan else row.refused for row in comparison.compare(plan, assumed)
            }
        print(json.dumps(values, indent=2))
        return 0 if plan.fits else 1
    console = Console(soft_wrap=True, highlight=False)
    print_plan(console, plan, assumed)
    if compare:
        print_comparison(console, comparison.compare(plan, assumed))
    print_verdict(console, plan, advice)
    return 0 if plan.fits else 1
