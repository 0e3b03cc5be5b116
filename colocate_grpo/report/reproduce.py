"""What it takes to do the run again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colocate_grpo.config import Config
from colocate_grpo.config_file import to_yaml
from colocate_grpo.report.accuracy import curves
from colocate_grpo.report.data_use import recorded_facts
from colocate_grpo.report.markdown import ABSENT, code, text_table, value_text
from colocate_grpo.report.record import RunRecord


def reproduce_section(run: RunRecord, named: Mapping[str, dict[str, Any]] | None = None) -> str:
    """Command, configuration, versions, hardware, seeds and fingerprints.

    `named`: configurations to tell the differences from, by name; the defaults where there are none.
    """
    parts = ["## Reproduce", _command(run), "### Seeds and fingerprints", text_table(["", ""], _fingerprints(run))]
    parts += ["### Versions and hardware", _environment(run)]
    if run.config:
        others = named or {"the defaults": _defaults(run)}
        parts += [_differences(run, name, values) for name, values in others.items()]
        parts.append("### Resolved configuration")
        parts.append(code(to_yaml(run.config), "yaml"))
    else:
        parts.append("The configuration is missing.")
    return "\n\n".join(parts)


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`section.key`, value) of nested mappings; lists are values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(values: dict[str, Any], others: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value, other value) where two configurations differ; the run's own place and name do not count."""
    mine, theirs = dict(flat(values)), dict(flat(others))
    keys = [key for key in {**mine, **theirs} if key not in ("run.name", "run.dir")]
    return [(key, mine.get(key), theirs.get(key)) for key in keys if mine.get(key) != theirs.get(key)]


def portable(command_line: str) -> str:
    """A command line without the place where this machine has the program."""
    try:
        program, *arguments = shlex.split(command_line)
    except ValueError:  # half a command line, with a quote that nothing closes
        return command_line
    return shlex.join([Path(program).name, *arguments])


def _command(run: RunRecord) -> str:
    starts = run.of_kind("attempt_start")
    command = next((start["command_line"] for start in starts if start.get("command_line")), None)
    if command is None:
        return "The command is not recorded; this does the same:\n\n" + code("colocate-grpo train config.yaml", "bash")
    return (
        f"{code(portable(command), 'bash')}\n\nor, with the resolved configuration below as `config.yaml`:\n\n"
        + code("colocate-grpo train config.yaml", "bash")
    )


def _fingerprints(run: RunRecord) -> Iterator[list[str]]:
    yield ["seed", f"`{run.option('run.seed', ABSENT)}`"]
    yield ["deterministic", f"`{run.option('run.deterministic', ABSENT)}`"]
    yield ["model", f"`{run.option('model.path', ABSENT)}`"]
    if run.option("model.revision"):
        yield ["model revision", f"`{run.option('model.revision')}`"]
    yield ["training data", f"`{recorded_facts(run).get('data/fingerprint', 'not recorded')}`"]
    for curve in curves(run):
        yield [f"protocol of eval/{curve.name}", f"`{curve.protocol}`"]


def _environment(run: RunRecord) -> str:
    starts = [event for event in run.of_kind("attempt_start") if "versions" in event]
    if not starts:
        return "Versions and hardware are not recorded."
    table = text_table(["", ""], _environment_rows(starts[-1]))
    differing_starts = {json.dumps([e["versions"], e.get("hardware"), e.get("commit")], sort_keys=True) for e in starts}
    if len(differing_starts) == 1:
        return table
    return f"{table}\n\n**{len(differing_starts)} different environments were recorded; this is the last one.**"


def _environment_rows(start: dict[str, Any]) -> Iterator[list[str]]:
    hardware = start.get("hardware") or {}
    gpus = [f"{gpu['name']} {gpu['gib']} GiB" for gpu in hardware.get("gpus", [])]
    yield ["GPUs", ", ".join(f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)) or "none"]
    if "driver" in hardware:
        yield ["NVIDIA driver", f"`{hardware['driver']}`"]
    yield ["processor", f"{hardware.get('cpu', ABSENT)}, {hardware.get('cores', ABSENT)} cores"]
    yield ["memory", f"{hardware.get('ram_gib', ABSENT)} GiB"]
    yield ["commit", f"`{start.get('commit') or 'an installed package'}`"]
    for package, version in start["versions"].items():
        yield [package, f"`{version}`"]


def _differences(run: RunRecord, name: str, others: dict[str, Any]) -> str:
    rows = [[f"`{key}`", value_text(value), value_text(other)] for key, value, other in differing(run.config, others)]
    title = f"### Differences from {name}"
    return f"{title}\n\n{text_table(['option', 'this run', name], rows)}" if rows else f"{title}\n\nNone."


def _defaults(run: RunRecord) -> dict[str, Any]:
    """The schema's defaults, with this run's model and data, which have none."""
    required = {"model": {"path": run.option("model.path") or ""}, "data": {"train": run.option("data.train") or ""}}
    return Config.model_validate(required).model_dump(mode="json")
