"""A few rollouts to read: the shortest and longest right and wrong ones of the first and the last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colocate_grpo.errors import DataError
from colocate_grpo.report.markdown import code, number
from colocate_grpo.report.record import RunRecord
from colocate_grpo.trajectory import Trajectory, read_trajectories

HEAD_CHARS, TAIL_CHARS = 700, 500
Decode = Callable[[list[int]], str]


def samples_section(run: RunRecord) -> str:
    """The section, or what is missing for it."""
    dumped = {step: _dumped(run, step) for step in _ends(run) if dump_path(run, step).exists()}
    if not dumped:
        return "## Samples\n\nNo rollouts were dumped (`run.dump_rollouts`), so that there are none to show."
    decode = decoder(run)
    parts = ["## Samples"]
    if decode is None:
        parts.append("The model's tokenizer is not there: token ids are shown.")
    for step, answers in dumped.items():
        parts.append(f"### Step {step}")
        parts += [_sample(title, t, decode) for title, t in choose(answers)] if answers else ["The dump is damaged."]
    return "\n\n".join(parts)


def damaged_samples(run: RunRecord) -> list[Path]:
    """Dumps of the steps shown that are there and cannot be read."""
    paths = [dump_path(run, step) for step in _ends(run)]
    return [path for path, step in zip(paths, _ends(run), strict=True) if path.exists() and not _dumped(run, step)]


def choose(trajectories: Sequence[Trajectory]) -> list[tuple[str, Trajectory]]:
    """(title, trajectory): the shortest and the longest right and wrong ones, none of them twice."""
    chosen: list[tuple[str, Trajectory]] = []
    for word, wanted in (("right", True), ("wrong", False)):
        group = [t for t in trajectories if t.score is not None and is_right(t) == wanted]
        if group:
            shortest = min(group, key=lambda t: t.response_length)
            longest = max(group, key=lambda t: t.response_length)
            chosen.append((f"Shortest {word} answer", shortest))
            if longest is not shortest:
                chosen.append((f"Longest {word} answer", longest))
    return chosen


def is_right(t: Trajectory) -> bool:
    return t.verdict is not None and t.verdict.reason == "correct"


def dump_path(run: RunRecord, step: int) -> Path:
    return run.run_dir / "rollouts" / f"step_{step}.jsonl.zst"


def decoder(run: RunRecord) -> Decode | None:
    """Token ids to text by the run's own tokenizer, where its directory is on this machine."""
    directories = [Path(str(run.option("model.path", ""))), *sorted((run.run_dir / "hf").glob("*"))]
    found = [d for d in directories if (d / "tokenizer.json").is_file() or (d / "tokenizer_config.json").is_file()]
    if not found:
        return None
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(found[0])
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def shortened(text: str) -> str:
    """Beginning and end of a long text."""
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    if left_out <= 0:
        return text
    return f"{text[:HEAD_CHARS]}\n[… {number(left_out)} characters left out …]\n{text[-TAIL_CHARS:]}"


def _dumped(run: RunRecord, step: int) -> list[Trajectory]:
    """The answers of a step; none where their dump is damaged."""
    try:
        return list(read_trajectories(dump_path(run, step)))
    except (DataError, OSError):  # the report names it, and goes on without it
        return []


def _ends(run: RunRecord) -> list[int]:
    steps = sorted(run.counted.steps)
    return list(dict.fromkeys([steps[0], steps[-1]])) if steps else []


def _sample(title: str, t: Trajectory, decode: Decode | None) -> str:
    return "\n\n".join(_sample_parts(title, t, decode))


def _sample_parts(title: str, t: Trajectory, decode: Decode | None) -> Iterator[str]:
    start = t.loss_mask.index(1) if 1 in t.loss_mask else len(t.token_ids)
    reason = t.verdict.reason if t.verdict else "no verdict"
    facts = f"score {number(t.score)}, `{reason}`, {number(t.response_length)} tokens, {t.status}"
    yield f"**{title}** (prompt `{t.prompt_id}`, {facts})"
    yield code(shortened(_text(t.token_ids[:start], decode)), "text")
    yield code(shortened(_text(t.token_ids[start:], decode)), "text")


def _text(ids: list[int], decode: Decode | None) -> str:
    return decode(ids) if decode else " ".join(map(str, ids))
