"""The four panels: accuracy with its noise band, reward and length, truncation, time by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from colocate_grpo.report.accuracy import Curve, curves
from colocate_grpo.report.cost import evaluation_seconds, parts_of
from colocate_grpo.report.headline import window
from colocate_grpo.report.record import RunRecord
from colocate_grpo.report.style import LINES, MARKERS, PHASES, Theme

SIZE_INCHES = (13.0, 8.6)
DPI = 110
# Above this many steps a bar is thinner than a pixel, and neighbouring ones are averaged.
MAX_BARS = 120
# A phase with less of the time is thinner than a line; the report's table has it.
VISIBLE_SHARE = 0.001
# Upper end of the panel of truncated answers, at least.
SMALLEST_SHARE = 0.05
# From this many steps on, single batches hide the trend.
SMOOTHED_FROM = 40


def draw(run: RunRecord, theme: Theme, kind: str) -> bytes:
    """The picture as `png` or `svg` bytes; the same run always gives the same bytes."""
    with mpl.rc_context(theme.settings()):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
        FigureCanvasAgg(figure)
        (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
        _accuracy(top_left, run, theme)
        _reward_and_length(top_right, run, theme)
        _truncation(bottom_left, run, theme)
        _time(bottom_right, run, theme)
        out = BytesIO()
        # Both writers put a date or a version into the file unless told otherwise.
        figure.savefig(out, format=kind, metadata={"Software": None} if kind == "png" else {"Date": None})
    return out.getvalue()


def _accuracy(axes: Axes, run: RunRecord, theme: Theme) -> None:
    axes.set_title("Evaluation accuracy (pass@1)")
    found = curves(run)
    bands = [curve for curve in found if curve.baselines]
    for index, curve in enumerate(found):
        look = _look(theme, index)
        if curve.baselines:
            _band(axes, curve, color=look["color"] if len(bands) > 1 else theme.band)
        base = [(0, _mean(p.accuracy for p in curve.baselines))] if curve.baselines else []
        xs, ys = zip(*base, *((p.updates, p.accuracy) for p in curve.trained), strict=True)
        axes.plot(xs, ys, label=_curve_label(curve, found), **look)
    _finish(axes, "updates before the evaluation", percent=True, empty=not found)


def _band(axes: Axes, curve: Curve, color: str) -> None:
    """The untouched model evaluated again and again. With one evaluation, +- its standard error."""
    values = [point.accuracy for point in curve.baselines]
    if len(values) > 1:
        low, high, label = min(values), max(values), f"{curve.name}: base, {len(values)} times"
    else:
        stderr = curve.baselines[0].values.get("stderr", 0.0)
        low, high, label = values[0] - stderr, values[0] + stderr, f"{curve.name}: base ± s.e."
    axes.axhspan(low, high, facecolor=color, alpha=0.25, edgecolor=color, linewidth=0.8, label=label)


def _curve_label(curve: Curve, found: Sequence[Curve]) -> str:
    several = sum(other.name == curve.name for other in found) > 1
    return f"{curve.name} ({curve.protocol[:6]})" if several else curve.name


def _reward_and_length(axes: Axes, run: RunRecord, theme: Theme) -> None:
    axes.set_title("Training reward and response length")
    twin = axes.twinx()
    twin.grid(False)
    _series(axes, run, "rollout/raw_reward", "reward (left)", _look(theme, 0, marker=False))
    _series(twin, run, "rollout/response_len/mean", "mean length (right)", _look(theme, 1, marker=False))
    axes.set_ylabel("mean reward", color=theme.series[0])
    twin.set_ylabel("mean response length (tokens)", color=theme.series[1])
    if twin.lines:
        twin.set_ylim(bottom=0)
    _finish(axes, "step", empty=not axes.lines, more=twin)


def _truncation(axes: Axes, run: RunRecord, theme: Theme) -> None:
    axes.set_title("Truncated answers")
    found = curves(run)
    for index, curve in enumerate(found):
        points = [p for p in [*curve.baselines[:1], *curve.trained] if "truncated_ratio" in p.values]
        # Between the step before the evaluation and the one after it.
        xs = [point.updates - 0.5 for point in points]
        label = f"evaluation: {_curve_label(curve, found)}"
        axes.plot(xs, [point.values["truncated_ratio"] for point in points], label=label, **_look(theme, index))
    training = {**_look(theme, 0, marker=False), "color": theme.text, "linewidth": 1.2}
    _series(axes, run, "rollout/truncated_ratio", "training", training)
    if axes.lines:
        # A little below zero, so that a curve at zero is not hidden by the axis; a single answer fills no panel.
        top = max(axes.get_ylim()[1], SMALLEST_SHARE)
        axes.set_ylim(-0.03 * top, top)
    _finish(axes, "step", percent=True, empty=not axes.lines)


def _time(axes: Axes, run: RunRecord, theme: Theme) -> None:
    axes.set_title("Time of a step by phase")
    axes.set_ylabel("seconds")
    evaluations = evaluation_seconds(run)
    columns = [{**parts_of(row), "evaluation": evaluations.get(row["step"] + 1, 0.0)} for row in run.steps]
    width, xs, columns = _thinned([row["step"] for row in run.steps], columns)
    bottom = [0.0] * len(xs)
    visible = VISIBLE_SHARE * sum(sum(column.values()) for column in columns)
    for name, color in zip(PHASES, theme.phases, strict=True):
        heights = [column[name] for column in columns]
        if sum(heights) > visible:
            axes.bar(xs, heights, width, bottom=bottom, color=color, label=name, linewidth=0)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _finish(axes, "step", empty=not columns)


def _thinned(
    steps: Sequence[int], columns: Sequence[dict[str, float]]
) -> tuple[float, list[float], list[dict[str, float]]]:
    """(bar width, middle of each bar, mean seconds) with at most MAX_BARS bars."""
    size = -(-len(steps) // MAX_BARS) if steps else 1
    groups = [slice(i, i + size) for i in range(0, len(steps), size)]
    middles = [_mean(steps[g]) for g in groups]
    means = [{name: _mean(c[name] for c in columns[g]) for name in PHASES} for g in groups]
    return 0.9 * size, middles, means


def _series(axes: Axes, run: RunRecord, metric: str, label: str, look: dict[str, Any]) -> None:
    """The values, and over a long run their running mean, with the single steps faint behind it."""
    steps, values = run.counted.series(metric)
    if not steps:
        return
    if len(steps) == 1:
        look = {**look, "marker": "o", "markersize": 5}
    size = window(len(steps))
    if len(steps) >= SMOOTHED_FROM:
        axes.plot(steps, values, **{**look, "alpha": 0.3, "linewidth": 1.0, "linestyle": "-"})
        values = [_mean(values[max(0, i + 1 - size) : i + 1]) for i in range(len(values))]
        label = f"{label}, mean of {size} steps"
    axes.plot(steps, values, label=label, **look)


def _look(theme: Theme, index: int, *, marker: bool = True) -> dict[str, Any]:
    """Colour, line and marker of the n-th series: each alone is enough to tell them apart."""
    look = {"color": theme.series[index % len(theme.series)], "linestyle": LINES[index % len(LINES)], "linewidth": 1.8}
    return look | ({"marker": MARKERS[index % len(MARKERS)], "markersize": 5} if marker else {})


def _finish(axes: Axes, x_label: str, *, percent: bool = False, empty: bool, more: Axes | None = None) -> None:
    """Labels, whole steps on the x axis, and the legend under the panel, where no curve is hidden by it."""
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    left, right = axes.get_xlim()
    if right - left < 2:  # a single step
        axes.set_xlim((left + right) / 2 - 1, (left + right) / 2 + 1)
    for spine in ("top", *(() if more else ("right",))):
        axes.spines[spine].set_visible(False)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    handles, labels = axes.get_legend_handles_labels()
    if empty or not (handles or more):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", fontsize=12)
        return
    if more is not None:
        more.spines["top"].set_visible(False)
        extra = more.get_legend_handles_labels()
        handles, labels = [*handles, *extra[0]], [*labels, *extra[1]]
    columns = 4 if max(map(len, labels)) <= 12 else 2
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns)


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected)
