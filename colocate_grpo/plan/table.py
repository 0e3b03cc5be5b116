"""The plan on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table

from colocate_grpo.plan.advice import Change, as_overrides
from colocate_grpo.plan.assessment import Plan
from colocate_grpo.plan.comparison import Alternative
from colocate_grpo.plan.hardware import GIB, Assumptions, runs_on_gpu
from colocate_grpo.plan.memory import CLASSES
from colocate_grpo.plan.timing import TimePlan, evaluations, explain, run_hours


def print_plan(console: Console, plan: Plan, assumed: Assumptions) -> None:
    """Memory, host, disk, time, and what was assumed."""
    console.print(_headline(plan))
    console.print(_memory_table(plan))
    for line in _other_lines(plan):
        console.print(line)
    if plan.time:
        for line in _time_lines(plan, plan.time, assumed):
            console.print(line)
    console.print(_assumption_table(assumed))


def print_verdict(console: Console, plan: Plan, advice: Sequence[Change]) -> None:
    """What does not fit, and the changes that make it fit."""
    problems = plan.problems()
    for problem in problems:
        console.print(f"[bold red]does not fit[/]  {problem}")
    for change in advice:
        console.print(f"[bold green]fits with[/]     {as_overrides(change)}")
    if problems and not advice:
        console.print("no change of up to three options makes it fit: more cards or a smaller model are needed")
    if not problems:
        console.print("[bold green]fits[/]")


def print_comparison(console: Console, rows: Sequence[Alternative]) -> None:
    """One row an alternative, the fastest that fits first."""
    table = Table(
        Column("alternative", overflow="fold"),
        "",
        "GiB",
        "KV seqs",
        "rollout",
        "train",
        "step",
        "run",
        box=None,
        pad_edge=False,
    )
    for row in rows:
        table.add_row(*_comparison_row(row), style="" if row.plan and row.plan.fits else "dim")
    console.print(table)
    console.print(
        "[dim]GiB: fullest phase of a card; rollout, train and step in minutes, run in hours, by the model[/]"
    )


def _comparison_row(row: Alternative) -> list[str]:
    if row.plan is None:
        return [row.name, row.refused]
    memory, time = row.plan.memory, row.plan.time
    cells = [row.name, "fits" if row.plan.fits else "does not fit"]
    cells += [f"{max(memory.total(p) for p in memory.table) / GIB:.1f}", str(memory.kv.sequences)]
    if time is None:
        return cells
    minutes = [f"{seconds / 60:.1f}" for seconds in (time.rollout, time.training, time.step)]
    return [*cells, *minutes, f"{run_hours(row.plan.config, time):.1f}"]


def _headline(plan: Plan) -> str:
    c, shape = plan.config, plan.shape
    place = "cards" if runs_on_gpu(c) else "CPU ranks"
    origin = "" if c.memory.gpu_gib or not runs_on_gpu(c) else " (those here)" if plan.card_bytes else " (none is here)"
    return (
        f"{c.model.path}: {_count(shape.parameters)} parameters; trainer TP{c.parallel.tp} DP{c.parallel.dp}, "
        f"{c.rollout.engines} x {c.rollout.engine} TP{c.rollout.tp}; "
        f"{place} of {plan.memory.budget / GIB:.1f} GiB{origin}"
    )


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(
        "GiB a rank" if not runs_on_gpu(plan.config) else "GiB a card", *memory.table, box=None, pad_edge=False
    )
    for name in CLASSES:
        cells = [_gib(rows.get(name, 0)) for rows in memory.table.values()]
        if any(cells):
            table.add_row(name, *cells)
    table.add_row("total", *[f"{memory.total(phase) / GIB:.2f}" for phase in memory.table], style="bold")
    table.add_row("free", *[f"{(memory.budget - memory.total(p)) / GIB:.2f}" for p in memory.table], style="dim")
    return table


def _other_lines(plan: Plan) -> Iterator[str]:
    kv, host, disk = plan.memory.kv, plan.host, plan.disk
    yield (
        f"activations  the longest sequence sets the peak: a micro-batch of {plan.largest_microbatch:,} tokens "
        f"(train.max_tokens_per_microbatch is {plan.config.train.max_tokens_per_microbatch:,})"
    )
    yield (
        f"KV cache     {kv.tokens:,} tokens an engine ({kv.bytes_per_token:,} bytes a token and card): "
        f"{kv.sequences} sequences of {kv.full_length:,} tokens at once"
    )
    fraction = plan.memory.suggested_fraction
    if fraction is not None:
        yield (
            f"             counts on rollout.sglang.mem_fraction_static={fraction:.2f}, which is not set: "
            "SGLang's own choice leaves the trainer no room"
        )
    phases = ", ".join(f"{phase} {size / GIB:.1f}" for phase, size in host.phases.items())
    yield (
        f"host RAM     {host.total / GIB:.1f} GiB at its fullest ({host.fullest}): "
        f"{host.processes / GIB:.1f} processes, {host.shm / GIB:.2f} /dev/shm, and by phase {phases}"
    )
    yield (
        f"disk         {disk.total / GIB:.1f} GiB: checkpoint {disk.values / GIB:.1f} GiB x "
        f"(up to {disk.live} kept + 1 being written), dumps {disk.dumps / GIB:.1f}, export {disk.export / GIB:.1f}"
    )


def _time_lines(plan: Plan, time: TimePlan, assumed: Assumptions) -> Iterator[str]:
    yield "time is a model: a simulated scheduler, lengths shaped like the published 8 x 4090 run, assumed speeds"
    stages = explain(plan.shape, plan.config, plan.memory.kv, plan.card, assumed)
    sums = [f"{name} {seconds / 60:.1f}" for name, seconds in stages]
    yield f"rollout      {sums[0]} min; {', '.join(sums[1:])} min in all"
    yield (
        f"             {time.tokens:,} tokens; slowest engine: {time.outcome.iterations:,} iterations, "
        f"{time.outcome.retractions} retractions, at most {time.outcome.peak_kv:,} KV tokens"
    )
    yield (
        f"step         {time.step / 60:.1f} min: rollout {time.rollout / 60:.1f}, training {time.training / 60:.1f}, "
        f"push {time.push:.0f} s, sleep and wake {time.sleep_wake:.0f} s; a save {time.save:.0f} s"
    )
    count = evaluations(plan.config)
    yield (
        f"evaluation   {count} x {time.evaluation / 3600:.1f} h = {count * time.evaluation / 3600:.1f} h; "
        f"whole run {run_hours(plan.config, time):.1f} h"
    )


def _assumption_table(assumed: Assumptions) -> Table:
    table = Table("assumed", "value", "meaning", box=None, pad_edge=False, style="dim", header_style="dim")
    for name, value, meaning in assumed.described():
        table.add_row(name, f"{value:g}", meaning)
    table.caption = "* fitted to one published run: 15 to 18 minutes of rollout on 8 x RTX 4090"
    table.caption_justify = "left"
    return table


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters:,}"


def _gib(value: int) -> str:
    return f"{value / GIB:.2f}" if value else ""
