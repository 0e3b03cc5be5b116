"""The report of a run: Markdown, pictures, one HTML file, and model cards."""

from __future__ import annotations

from pathlib import Path

from colocate_grpo.errors import writable_directory
from colocate_grpo.report.chronicle import chronicle_section
from colocate_grpo.report.cost import cost_section
from colocate_grpo.report.data_use import data_section
from colocate_grpo.report.headline import headline_section
from colocate_grpo.report.missing import missing
from colocate_grpo.report.model_card import exported_models, write_model_card
from colocate_grpo.report.page import page
from colocate_grpo.report.pictures import draw
from colocate_grpo.report.protocols import noise_section, protocol_section
from colocate_grpo.report.record import RunRecord, load_record
from colocate_grpo.report.reproduce import reproduce_section
from colocate_grpo.report.samples import samples_section
from colocate_grpo.report.side_by_side import other_configurations, side_by_side_section
from colocate_grpo.report.style import DARK, LIGHT

MARKDOWN, HTML, PICTURE = "EXPERIMENT_REPORT.md", "report.html", "curves.png"
ALTERNATIVE_TEXT = (
    "Four panels over the run: evaluation accuracy with the noise band of the untouched model; training reward and"
    " mean response length; truncated answers in training and evaluation; time of a step by phase"
)


def write_report(
    run_dir: Path, *, reference: Path | None = None, compare: Path | None = None, out: Path | None = None
) -> Path:
    """Write the report of a run, finished or still going, and return the Markdown file.

    `reference`: JSON with a published run's figures; `compare`: another run directory. The files go to `out`,
    by default `run_dir/report`. Raises DataError where one of them is not what it should be.
    """
    run = load_record(run_dir)
    text = compose(run, reference, compare)
    directory = writable_directory(Path(out) if out else run.run_dir / "report")
    (directory / PICTURE).write_bytes(draw(run, LIGHT, "png"))
    pictures = {PICTURE: (draw(run, LIGHT, "svg"), draw(run, DARK, "svg"))}
    (directory / HTML).write_text(page(text, f"{run.name}: experiment report", pictures), encoding="utf-8")
    (directory / MARKDOWN).write_text(text, encoding="utf-8")
    for model_dir, step in exported_models(run):
        write_model_card(run, model_dir, step)
    return directory / MARKDOWN


def compose(run: RunRecord, reference: Path | None = None, compare: Path | None = None) -> str:
    """The whole report as Markdown."""
    sections = [
        f"# {run.name}: experiment report",
        _introduction(run),
        _missing(run),
        headline_section(run),
        f"## Curves\n\n![{ALTERNATIVE_TEXT}]({PICTURE})",
        noise_section(run),
        protocol_section(run),
        side_by_side_section(run, reference, compare),
        cost_section(run),
        data_section(run),
        chronicle_section(run),
        samples_section(run),
        reproduce_section(run, other_configurations(reference, compare)),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    # JSON may hold half a character, which no file can.
    return text.encode(errors="replace").decode()


def _introduction(run: RunRecord) -> str:
    model = run.option("model.path", "a model that is not recorded")
    data = run.option("data.train", "data that are not recorded")
    return (
        f"GRPO on `{model}` with the prompts of `{data}`: {len(run.steps)} of"
        f" {run.option('run.steps', 'an unknown number of')} steps. Every figure below is computed from the run's own"
        " `metrics.jsonl`, `events.jsonl`, dumped rollouts, checkpoints and configuration."
    )


def _missing(run: RunRecord) -> str | None:
    lines = missing(run)
    return "**What is missing**\n\n" + "\n".join(f"* {line}" for line in lines) if lines else None
