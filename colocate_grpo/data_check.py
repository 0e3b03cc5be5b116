"""`colocate-grpo data check FILE`: what a data file holds, and what is wrong with it."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from colocate_grpo.config import DataConfig
from colocate_grpo.data import asks_for_form, load_tokenizer, messages_of, render, tokenize
from colocate_grpo.data_file import BrokenRow, Message, Row, describe_broken, read_rows
from colocate_grpo.errors import UserError
from colocate_grpo.hub import resolve_data, resolve_tokenizer

SHOWN_BROKEN = 20
SHOWN_CHARACTERS = 20_000


def run_data_check(path: Path, tokenizer: str | None = None, settings: DataConfig | None = None) -> int:
    """Print the report; exit code 2 when a row is broken, or too long under the policy `error`, else 0.

    With a model directory or hub name in `tokenizer`, prompts are rendered by its chat template and counted in tokens.
    """
    settings = settings or DataConfig.model_validate({"train": str(path)})
    model_dir = resolve_tokenizer(tokenizer) if tokenizer else None
    rows = list(read_rows(resolve_data(str(path), "data check"), settings.prompt_key, settings.label_key))
    good = [row for row in rows if isinstance(row, Row)]
    broken = [row for row in rows if isinstance(row, BrokenRow)]
    report = _Report(Console(soft_wrap=True))
    report.counts(good, broken)
    ok = bool(good) and not broken
    if good:
        ok &= _check_prompts(report, good, settings, load_tokenizer(model_dir) if model_dir else None)
    else:
        report.error("no usable row")
    return 0 if ok else UserError.exit_code


def _check_prompts(report: _Report, rows: Sequence[Row], settings: DataConfig, tokenizer: object) -> bool:
    conversations = [messages_of(row, settings) for row in rows]
    report.lengths("prompt, characters", [sum(len(m["content"]) for m in c) for c in conversations])
    report.lengths("label, characters", [len(row.label) for row in rows])
    fits = True
    if tokenizer:
        texts = [render(messages, tokenizer, settings) for messages in conversations]
        lengths = [len(ids) for ids in tokenize(texts, tokenizer)]
        report.lengths("prompt, tokens", lengths)
        fits = report.overlong(rows, lengths, settings)
        report.rendered(texts[0])
    else:
        report.rendered("\n".join(f"[{m['role']}] {m['content']}" for m in conversations[0]))
        report.note("no --tokenizer: the chat template is not applied, and tokens are not counted")
    report.forms(conversations)
    return fits


class _Report:
    """Lines on the console, in the order in which they are asked for."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def counts(self, rows: Sequence[Row], broken: Sequence[BrokenRow]) -> None:
        labels = defaultdict(set)
        for row in rows:
            labels[_question(row)].add(row.label)
        kinds = Counter(row.label_kind for row in rows)
        table = Table.grid(padding=(0, 2))
        table.add_row("rows", str(len(rows) + len(broken)))
        table.add_row("unique prompts", f"{len(labels)} ({len(rows) - len(labels)} duplicates)")
        table.add_row("labels", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
        self.console.print(table)
        if broken:
            self.error(describe_broken(broken, SHOWN_BROKEN))
        contradictory = [question for question, given in labels.items() if len(given) > 1]
        if contradictory:
            self.warn(f"{len(contradictory)} prompts have more than one label, first: {contradictory[0][:60]!r}")

    def lengths(self, name: str, values: Sequence[int]) -> None:
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
        median = statistics.median(ordered)
        self._line(f"{name}: min {ordered[0]}, median {median:.10g}, 95 % {p95}, max {ordered[-1]}")

    def overlong(self, rows: Sequence[Row], lengths: Sequence[int], settings: DataConfig) -> bool:
        """Says how many prompts are too long; False where the policy makes that an error."""
        long = [row.line for row, n in zip(rows, lengths, strict=True) if n > settings.max_prompt_tokens]
        if not long:
            return True
        message = f"{len(long)} prompts are longer than data.max_prompt_tokens={settings.max_prompt_tokens}"
        where = f"{message} (first: line {long[0]}); data.overlong_prompts={settings.overlong_prompts}"
        drop = settings.overlong_prompts == "drop"
        (self.warn if drop else self.error)(where)
        return drop

    def rendered(self, text: str) -> None:
        self._line("first prompt as the model sees it:")
        self.console.rule(style="dim")
        more = len(text) - SHOWN_CHARACTERS
        self._line(text if more <= 0 else f"{text[:SHOWN_CHARACTERS]} ... [{more:,} more characters]")
        self.console.rule(style="dim")

    def forms(self, conversations: Sequence[Sequence[Message]]) -> None:
        silent = sum(not asks_for_form(messages) for messages in conversations)
        if silent:
            self.warn(
                f"{silent} of {len(conversations)} prompts ask neither for a \\boxed{{}} nor for `Answer:`, so the "
                "grader may find no answer; set data.prompt_suffix or data.system"
            )

    def note(self, text: str) -> None:
        self.console.print(f"[dim]note:[/] {escape(text)}", highlight=False)

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False)

    def error(self, text: str) -> None:
        self.console.print(f"[red]error:[/] {escape(text)}", highlight=False)

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


def _question(row: Row) -> str:
    text = row.prompt if isinstance(row.prompt, str) else " ".join(m["content"] for m in row.prompt)
    return " ".join(text.split())
