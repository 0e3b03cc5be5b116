"""Recomputes a report's headline from the raw dumps alone, with none of the product's code.

    python recompute_headline.py RUN_DIR SET BASELINES LAST_STEP BEST_STEP      # prints JSON

The steps and the number of baselines are given by whoever checks; every figure comes from `rollouts/`.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import zstandard
from scipy import stats


def read(path: Path) -> list[dict]:
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file)
        return [json.loads(line) for line in io.TextIOWrapper(reader, encoding="utf-8")]


def scored(rows: list[dict]) -> dict[str, list[float]]:
    problems: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["status"] != "failed" and row["verdict"] and row["verdict"]["score"] is not None:
            problems[row["prompt_id"]].append(row["verdict"]["score"])
    return problems


def means(*dumps: list[dict]) -> dict[str, float]:
    together: dict[str, list[float]] = defaultdict(list)
    for dump in dumps:
        for problem, scores in scored(dump).items():
            together[problem] += scores
    return {problem: sum(scores) / len(scores) for problem, scores in together.items()}


def rate(*dumps: list[dict]) -> tuple[float, float]:
    """pass@1 and its standard error in percent."""
    values = list(means(*dumps).values())
    return 100 * statistics.fmean(values), 100 * statistics.stdev(values) / len(values) ** 0.5


def difference(before: list[list[dict]], after: list[dict]) -> tuple[float, float, float]:
    """Points, and the 95 % interval of the paired t-test."""
    first, second = means(*before), means(after)
    deltas = [100 * (second[problem] - first[problem]) for problem in first]
    low, high = stats.t.interval(0.95, len(deltas) - 1, statistics.fmean(deltas), stats.sem(deltas))
    return statistics.fmean(deltas), low, high


def length(row: dict) -> int:
    return sum(row["loss_mask"])


def figures(*dumps: list[dict]) -> dict[str, float]:
    """Means over the dumps of each dump's figures."""
    return {
        "response length, mean": statistics.fmean(statistics.fmean(map(length, dump)) for dump in dumps),
        "response length, median": statistics.fmean(statistics.median(map(length, dump)) for dump in dumps),
        "truncated": 100 * statistics.fmean(share(dump, lambda r: r["status"] == "truncated") for dump in dumps),
        "degenerate repetition": 100
        * statistics.fmean(share(dump, lambda r: bool(r["metadata"].get("repetitive"))) for dump in dumps),
    }


def share(rows: list[dict], what) -> float:
    return sum(map(what, rows)) / len(rows)


def headline(run_dir: Path, name: str, baselines: int, last: int, best: int) -> dict:
    base = [read(run_dir / f"rollouts/eval_{name}_baseline_{i}.jsonl.zst") for i in range(baselines)]
    columns = {"last": last, "best": best}
    dumps = {key: read(run_dir / f"rollouts/eval_{name}_step_{step}.jsonl.zst") for key, step in columns.items()}
    result: dict = {"base": {"pass@1": rate(*base), **figures(*base)}}
    for key, dump in dumps.items():
        result[key] = {"pass@1": rate(dump), "difference": difference(base, dump), **figures(dump)}
    return result


def training(run_dir: Path, steps: list[int]) -> dict[str, float]:
    dumps = [read(run_dir / f"rollouts/step_{step}.jsonl.zst") for step in steps]
    rewards = [[score for scores in scored(dump).values() for score in scores] for dump in dumps]
    return {"reward": statistics.fmean(map(statistics.fmean, rewards)), **figures(*dumps)}


if __name__ == "__main__":
    print(json.dumps(headline(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])), indent=1))
