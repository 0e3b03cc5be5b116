"""The plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from colocate_grpo.plan.advice import Change, as_overrides
from colocate_grpo.plan.assessment import Plan
from colocate_grpo.plan.hardware import GIB, Assumptions
from colocate_grpo.plan.memory import CLASSES


def print_plan(console: Console, plan: Plan, assumed: Assumptions) -> None:
    console.print(_headline(plan))
    console.print(_memory_table(plan))
    for line in _other_lines(plan):
        console.print(line)
    console.print(_assumption_table(assumed))


def print_verdict(console: Console, plan: Plan, advice: Sequence[Change]) -> None:
    problems = plan.memory.problems()
    for problem in problems:
        console.print(f"[bold red]does not fit[/] {problem}")
    for change in advice:
        console.print(f"[bold green]fits with[/]    {as_overrides(change)}")
    if problems and not advice:
        console.print("no change of up to three options makes it fit: more cards or a smaller model are needed")
    if not problems:
        console.print("[bold green]fits[/]")


def _headline(plan: Plan) -> str:
    c, shape = plan.config, plan.shape
    return (
        f"{c.model.path}: {shape.parameters / 1e9:.2f} B parameters; trainer TP{c.parallel.tp} DP{c.parallel.dp}, "
        f"{c.rollout.engines} x {c.rollout.engine} TP{c.rollout.tp}; cards of {plan.memory.budget / GIB:.1f} GiB"
    )


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table("GiB a card", *memory.table, "", box=None, pad_edge=False)
    for name in CLASSES:
        cells = [_gib(rows.get(name, 0)) for rows in memory.table.values()]
        if any(cells):
            table.add_row(name, *cells)
    table.add_row("total", *[f"{memory.total(phase) / GIB:.2f}" for phase in memory.table], style="bold")
    table.add_row("free", *[f"{(memory.budget - memory.total(p)) / GIB:.2f}" for p in memory.table], style="dim")
    return table


def _other_lines(plan: Plan) -> list[str]:
    kv, host, disk = plan.memory.kv, plan.host, plan.disk
    return [
        f"KV cache     {kv.tokens:,} tokens an engine ({kv.bytes_per_token:,} bytes a token and card): "
        f"{kv.sequences} sequences of {kv.full_length:,} tokens at once",
        f"host RAM     {host.total / GIB:.1f} GiB: {host.backup / GIB:.1f} asleep, "
        f"{host.processes / GIB:.1f} processes, {host.shm / GIB:.2f} /dev/shm",
        f"disk         {disk.total / GIB:.1f} GiB: checkpoint {disk.checkpoint / GIB:.1f} GiB x "
        f"({disk.live} kept + 1), dumps up to {disk.dumps / GIB:.1f}, export {disk.export / GIB:.1f}",
    ]


def _assumption_table(assumed: Assumptions) -> Table:
    table = Table("assumed", "value", "meaning", box=None, pad_edge=False, style="dim", header_style="dim")
    for name, value, meaning in assumed.described():
        table.add_row(name, f"{value:g}", meaning)
    return table


def _gib(value: int) -> str:
    return f"{value / GIB:.2f}" if value else ""
