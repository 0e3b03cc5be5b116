"""`colocate-grpo report`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from colocate_grpo.report.record import load_record


def run_report(
    run_dir: Path,
    *,
    reference: Path | None = None,
    compare: Path | None = None,
    out: Path | None = None,
    tensorboard: bool = False,
) -> int:
    """Write the report of `run_dir`, or rebuild only its TensorBoard files; returns the exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if tensorboard:
        from colocate_grpo.observe.tensorboard import rebuild

        load_record(run_dir)  # refuses what is no run directory
        console.print(f"TensorBoard files: {rebuild(run_dir)}")
        return 0
    from colocate_grpo.report.experiment import write_report
    from colocate_grpo.report.missing import missing

    path = write_report(run_dir, reference=reference, compare=compare, out=out)
    for line in missing(load_record(run_dir)):
        console.print(f"missing: {line}", markup=False)
    console.print(f"report: {path}, {path.with_name('report.html')}")
    return 0
