"""What a person sees of a running attempt: a bar through the rollout, then one line a step."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from colocate_grpo.disk_full import best_effort
from colocate_grpo.observe.jsonl import Row
from colocate_grpo.observe.metrics import MetricsLog, eval_points, is_number
from colocate_grpo.observe.state import read_state

_REFRESH_S = 0.5


class LiveConsole:
    """Follows a run directory from its files; the ranks do not know that anybody looks."""

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.console = console or Console(stderr=True, highlight=False)
        self._rows_shown = len(MetricsLog.read(self.run_dir).rows)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._refreshed = 0.0

    def __enter__(self) -> LiveConsole:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick(force=True)
        self._live.stop()

    def tick(self, force: bool = False) -> None:
        """Print what is new; called often, does something twice a second."""
        if not force and time.monotonic() - self._refreshed < _REFRESH_S:
            return
        self._refreshed = time.monotonic()
        rows = MetricsLog.read(self.run_dir).rows
        new, self._rows_shown = rows[self._rows_shown :], max(self._rows_shown, len(rows))
        with best_effort("the output"):
            for line in filter(None, map(line_of, new)):
                self.console.print(line, soft_wrap=True)
        if self.console.is_terminal:
            self._live.update(_progress(read_state(self.run_dir)), refresh=True)


def line_of(row: Row) -> Text | None:
    """One line for a step or an evaluation; None for other rows."""
    if row["kind"] == "step":
        return Text(_step_line(row))
    if row["kind"] == "eval":
        return Text("\n".join(_eval_line(row, name) for name in (p.name for p in eval_points(row))), style="bold")
    return None


def _step_line(row: Row) -> str:
    parts = [f"step {row['step']:>4}"]
    parts += [
        f"{label} {row[key]:{form}}"
        for label, key, form in (
            ("reward", "rollout/raw_reward", ".3f"),
            ("len", "rollout/response_len/mean", ".1f"),
            ("trunc", "rollout/truncated_ratio", ".1%"),
            ("entropy", "train/entropy_loss", ".3f"),
            ("grad", "train/grad_norm", ".3f"),
            ("mismatch", "train/train_rollout_logprob_abs_diff", ".1e"),
            ("step", "perf/step_time", ".1f"),
        )
        if is_number(row.get(key))
    ]
    return "  ".join(parts) + " s"


def _eval_line(row: Row, name: str) -> str:
    what = "untouched model" if row.get("baseline") is not None else f"after step {row['step']}"
    error = row.get(f"eval/{name}/stderr")
    return f"eval {name} ({what}): pass@1 {row[f'eval/{name}']:.3f}" + (f" ± {error:.3f}" if is_number(error) else "")


def _progress(state: dict[str, Any]) -> Table:
    rollout = state.get("rollout") or {}
    grid = Table.grid(padding=(0, 2))
    cells: list[Any] = [f"step {state.get('step', 0)}/{state.get('steps', '?')}", str(state.get("phase", ""))]
    if state.get("phase") in ("rollout", "eval") and rollout:
        cells.append(ProgressBar(total=max(rollout["total"], 1), completed=rollout["done"], width=40))
        cells.append(f"{rollout['done']}/{rollout['total']}  {rollout.get('tokens_per_s', 0):.0f} token/s")
    grid.add_row(*cells)
    return grid
