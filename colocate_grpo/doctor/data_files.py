"""Training and evaluation data: there, readable, and no broken line."""

from __future__ import annotations

from colocate_grpo.data_file import BrokenRow, describe_broken, read_rows
from colocate_grpo.doctor.finding import Context, Finding, fail, ok
from colocate_grpo.errors import DataError


def check(context: Context) -> Finding:
    config = context.required_config
    counts: list[str] = []
    for path in [config.data.train, *(s.path for s in config.eval.sets)]:
        if path.startswith(("hf:", "modelscope:")):
            counts.append(f"{path}: fetched at the start")
            continue
        try:
            rows = list(read_rows(path, config.data.prompt_key, config.data.label_key))
        except DataError as error:  # a finding, not the end of the other checks
            return fail(str(error), "put the file there, or set data.train / eval.sets.N.path")
        broken = [row for row in rows if isinstance(row, BrokenRow)]
        if broken or not rows:
            problem = describe_broken(broken) if broken else "empty"
            return fail(
                f"{path}: {problem}", f"mend the file; `colocate-grpo data check {path}` lists every broken line"
            )
        counts.append(f"{path}: {len(rows)} rows")
    return ok("; ".join(counts))
