"""`colocate-grpo doctor`: one line a check."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pynvml
from rich.console import Console
from rich.markup import escape

from colocate_grpo.config import Config
from colocate_grpo.doctor import (
    allocator,
    allreduce,
    c_extension,
    caches,
    context_length,
    cuda_toolkit,
    data_files,
    disk,
    driver,
    gpu_processes,
    gpus,
    host_memory,
    limits,
    lingering,
    memory_plan,
    model_files,
    ninja,
    orphans,
    ports,
    saver_preload,
    shared_memory,
    tokenizer,
    triton_kernel,
    versions,
)  # fmt: skip
from colocate_grpo.doctor.finding import Context, Finding, fail
from colocate_grpo.errors import UserError
from colocate_grpo.preflight import check_engine_options

MACHINE: tuple[ModuleType, ...] = (
    gpus, driver, gpu_processes, versions, allreduce, allocator, c_extension, triton_kernel, cuda_toolkit, ninja,
    saver_preload, caches, host_memory, shared_memory, limits, ports, lingering, orphans,
)  # fmt: skip
CONFIGURATION: tuple[ModuleType, ...] = (memory_plan, disk, model_files, tokenizer, context_length, data_files)
STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_doctor(config: Config | None, *, json_out: bool) -> int:
    """Run every check; 1 if one fails, else 0. ConfigError for an engine option that there is not."""
    if config:
        check_engine_options(config)
    findings = list(examine(Context(config=config, nvml=pynvml)))
    if json_out:
        print(json.dumps(as_json(findings), indent=2))
    else:
        print_findings(findings)
    return 1 if any(finding.level == "fail" for _, finding in findings) else 0


def examine(context: Context) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found), in order; the configuration's checks only where there is one."""
    modules = MACHINE + (CONFIGURATION if context.config else ())
    with ThreadPoolExecutor() as pool:  # the slow ones wait for processes of their own
        findings = pool.map(lambda module: _run(module, context), modules)
        for module, finding in zip(modules, findings, strict=True):
            yield module.__name__.rpartition(".")[2], finding


def _run(module: ModuleType, context: Context) -> Finding:
    try:
        return module.check(context)
    except UserError as error:
        return fail(str(error), "correct the configuration")
    except Exception as error:  # one check that breaks must not hide what the others find
        return fail(f"the check itself broke: {type(error).__name__}: {error}", "please report this")


def as_json(findings: Sequence[tuple[str, Finding]]) -> dict[str, object]:
    """`environment` collects the variables that the findings ask the run to set."""
    rows = [{"check": name, "level": f.level, "what": f.what, "how_to_mend": f.how_to_mend} for name, f in findings]
    environment = {key: value for _, f in findings for key, value in f.environment.items()}
    return {"ok": all(f.level != "fail" for _, f in findings), "checks": rows, "environment": environment}


def print_findings(findings: Sequence[tuple[str, Finding]]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    width = max(len(name) for name, _ in findings)
    for name, finding in findings:
        mend = f" -> {finding.how_to_mend}" if finding.how_to_mend else ""
        label = f"[{STYLE[finding.level]}]{finding.level:4}[/]"
        console.print(f"{label} {name:{width}}  {escape(finding.what)}[dim]{escape(mend)}[/]")
    counts = {level: sum(f.level == level for _, f in findings) for level in STYLE}
    console.print(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
