"""The command line. Commands import what they need when they run: `--help` and a bad config answer at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from colocate_grpo.errors import UserError

if TYPE_CHECKING:
    from colocate_grpo.config import Config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
checkpoints = typer.Typer(no_args_is_help=True, help="List, pin, roll back and prune checkpoints.")
data = typer.Typer(no_args_is_help=True, help="Look at data files.")
config = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(data, name="data")
app.add_typer(config, name="config")

ConfigPath = Annotated[Path, typer.Argument(help="Configuration file (YAML).", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", metavar="[OVERRIDE]...")]
RunDir = Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN_DIR")]
PIPE_WIDTH = 200
WIDE = 140
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def train(path: ConfigPath, overrides: Overrides = None, replay: Annotated[
    Path | None, typer.Option(help="Train from the dumped rollouts in this directory, with no engine.")
] = None) -> None:  # fmt: skip
    """Start a run, or go on with it from its newest complete checkpoint."""
    raise typer.Exit(_supervise(path, overrides, replay=replay))


@app.command("eval")
def evaluate(path: ConfigPath, overrides: Overrides = None) -> None:
    """Evaluate the run's newest checkpoint, or the untouched model where there is none."""
    raise typer.Exit(_supervise(path, overrides, evaluate_only=True))


@app.command()
def plan(
    path: ConfigPath,
    overrides: Overrides = None,
    json_out: Json = False,
    compare: Annotated[bool, typer.Option(help="Compare alternative layouts.")] = False,
) -> None:
    """Memory, disk and time of a configuration, before the first step."""
    from colocate_grpo.plan.command import run_plan

    raise typer.Exit(run_plan(_load(path, overrides), json_out=json_out, compare=compare))


@app.command()
def doctor(
    path: Annotated[Path | None, typer.Argument(help="Configuration file (YAML).", metavar="[CONFIG]")] = None,
    overrides: Overrides = None,
    json_out: Json = False,
) -> None:
    """Check this machine, one line a check, and say how to mend what is wrong."""
    from colocate_grpo.doctor.command import run_doctor

    raise typer.Exit(run_doctor(_load(path, overrides) if path else None, json_out=json_out))


@app.command()
def report(
    run_dir: RunDir,
    reference: Annotated[Path | None, typer.Option(help="A published run's figures (JSON) beside this run's.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another run directory beside this one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the report; default RUN_DIR/report.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Only rebuild tensorboard/ from metrics.jsonl.")] = False,
) -> None:
    """Write EXPERIMENT_REPORT.md, curves.png and report.html of a run, finished or still going."""
    from colocate_grpo.report.command import run_report

    raise typer.Exit(run_report(run_dir, reference=reference, compare=compare, out=out, tensorboard=tensorboard))


@app.command()
def grade(
    path: Annotated[str, typer.Argument(help="jsonl with `response` or `pred`, and `gold`; `-` is stdin.")],
    out: Annotated[str | None, typer.Option(help="Where to write the graded rows.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Hard limit for one answer.", min=0.001)] = 2.0,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1)] = 2,
    answer_scope: Annotated[
        Literal["after_think", "whole", "auto"], typer.Option(help="Where the box may be.")
    ] = "auto",
) -> None:
    """Grade answers: adds `score` and `reason`; prints the agreement where `expected` is present."""
    from colocate_grpo.reward.command import run_grade

    raise typer.Exit(run_grade(path, out, timeout_s=timeout_s, workers=workers, answer_scope=answer_scope))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="Run directory or one checkpoint in it.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
) -> None:
    """Write a Hugging Face directory of a run's newest checkpoint (or of the given one)."""
    import warnings

    warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")  # what they say to each other
    from colocate_grpo.report.model_card import write_export_card
    from colocate_grpo.weights.export import export_hf

    exported = export_hf(source, out)
    write_export_card(source, exported)
    Console(stderr=True).print(f"exported to {exported}", highlight=False, soft_wrap=True)


@app.command()
def status(run_dir: RunDir, json_out: Json = False) -> None:
    """What a run is doing, from its files alone."""
    from colocate_grpo.status import run_status

    raise typer.Exit(run_status(run_dir, json_out=json_out))


@app.command()
def stop(run_dir: RunDir) -> None:
    """End a run cleanly from another shell, and what an earlier one left behind."""
    from colocate_grpo.status import run_stop

    raise typer.Exit(run_stop(run_dir))


@app.command("demo-model")
def demo_model(
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the whole recipe.")] = 0,
) -> None:
    """Make the demo's tiny model and its data, deterministic from the seed."""
    from colocate_grpo.demo.command import run_demo_model

    raise typer.Exit(run_demo_model(out, seed))


@data.command("check")
def data_check(
    path: Annotated[Path, typer.Argument(help="jsonl or parquet file.")],
    tokenizer: Annotated[str | None, typer.Option(help="Model directory or hub name, to render and count.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config", help="Take data.* from this configuration.")] = None,
) -> None:
    """Rows, unique rows, lengths, label kinds, one rendered prompt, and the broken lines by number."""
    from colocate_grpo.data_check import run_data_check

    settings = _load(config_path, None).data if config_path else None
    raise typer.Exit(run_data_check(path, tokenizer=tokenizer, settings=settings))


@config.command("explain")
def config_explain() -> None:
    """Every option with its type, default and meaning (* = changing it makes another run)."""
    from colocate_grpo.config_file import explain_rows

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH  # for grep, an option is one line
    wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False, show_header=wide)
    for column in ("option", "type", "default", "meaning") if wide else ("option", "meaning"):
        table.add_column(column, no_wrap=column == "option")
    for name, kind, default, meaning in explain_rows():
        cells = (name, kind, default, meaning) if wide else (f"{name}\n  {kind} = {default}", meaning)
        table.add_row(*map(escape, cells))
    console.print(table)


@config.command("show")
def config_show(path: ConfigPath, overrides: Overrides = None) -> None:
    """The resolved configuration."""
    from colocate_grpo.config_file import to_yaml

    typer.echo(to_yaml(_load(path, overrides).model_dump(mode="json")), nl=False)


@checkpoints.command("list")
def checkpoints_list(
    run_dir: RunDir,
    verify: Annotated[bool, typer.Option(help="Read every file and compare its hash.")] = False,
    json_out: Json = False,
) -> None:
    """Complete checkpoints, and what was skipped and why."""
    from colocate_grpo.checkpoint.command import run_list

    raise typer.Exit(run_list(run_dir, verify=verify, json_out=json_out))


@checkpoints.command("pin")
def checkpoints_pin(
    run_dir: RunDir, step: int, undo: Annotated[bool, typer.Option(help="Let it go again.")] = False
) -> None:
    """Keep the checkpoint of a step for good."""
    from colocate_grpo.checkpoint.command import run_pin

    raise typer.Exit(run_pin(run_dir, step, undo=undo))


@checkpoints.command("rollback")
def checkpoints_rollback(run_dir: RunDir, step: int) -> None:
    """Go back to the checkpoint of a step; data order and metrics go back with it."""
    from colocate_grpo.checkpoint.command import run_rollback

    raise typer.Exit(run_rollback(run_dir, step))


@checkpoints.command("prune")
def checkpoints_prune(
    run_dir: RunDir, dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False
) -> None:
    """Remove the checkpoints that the rules no longer keep."""
    from colocate_grpo.checkpoint.command import run_prune

    raise typer.Exit(run_prune(run_dir, dry_run=dry_run))


def _supervise(
    path: Path, overrides: list[str] | None, *, replay: Path | None = None, evaluate_only: bool = False
) -> int:
    """Check everything that a user can get wrong, then drive the run."""
    import logging

    from colocate_grpo.driver import supervise
    from colocate_grpo.preflight import preflight

    config = _load(path, overrides)
    preflight(config, with_engine=replay is None)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return supervise(config, command_line=sys.argv, replay=replay, evaluate_only=evaluate_only)


def _load(path: Path, overrides: list[str] | None) -> Config:
    from colocate_grpo.config_file import load_config

    return load_config(path, overrides or ())


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
