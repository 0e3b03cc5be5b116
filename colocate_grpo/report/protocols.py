"""How the evaluations were done, and the noise they have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colocate_grpo.report.accuracy import Curve, curves, measure
from colocate_grpo.report.markdown import ABSENT, number, percent, step_ranges, table, text_table
from colocate_grpo.report.record import RunRecord
from colocate_grpo.report.statistics import sampling_noise


def noise_section(run: RunRecord) -> str:
    """The untouched model evaluated several times: what a difference must exceed to mean anything."""
    repeated = [curve for curve in curves(run) if curve.baselines]
    if not repeated:
        return "## Noise\n\nThe untouched model was not evaluated, so that the noise is not known."
    header = ["evaluation set, protocol", "evaluations of the base", "lowest", "highest", "spread (points)",
              "noise of one evaluation (points)"]  # fmt: skip
    rows = [_noise_row(run, curve) for curve in repeated]
    return "\n\n".join(["## Noise", table(header, rows), *_noise_notes(repeated)])


def protocol_section(run: RunRecord) -> str:
    """Which evaluations may be compared with which."""
    found = curves(run)
    if not found:
        return "## Protocols\n\nNo evaluation is recorded."
    rows = [[curve.name, f"`{curve.protocol}`", _evaluated_at(curve), _size(curve)] for curve in found]
    parts = ["## Protocols", text_table(["set", "protocol", "evaluated after", "problems × samples"], rows)]
    parts.append(
        "A protocol's fingerprint covers the data, the prompt template, temperature, top-p, token limit, samples and"
        " grader. Figures of different fingerprints share neither a curve nor a difference."
    )
    changed = sorted({curve.name for curve in found if sum(c.name == curve.name for c in found) > 1})
    if changed:
        names = ", ".join(f"`eval/{name}`" for name in changed)
        parts.append(f"**The protocol of {names} changed during this run**: its parts are told apart everywhere.")
    parts.append(_settings(run))
    return "\n\n".join(parts)


def _noise_row(run: RunRecord, curve: Curve) -> list[str]:
    values = [point.accuracy for point in curve.baselines]
    base = measure(run, curve.baselines)
    # Several evaluations taken together are less noisy than each of them.
    noise = sampling_noise(base.scores) * np.sqrt(len(values)) if base and base.scores else float("nan")
    return [
        f"`eval/{curve.name}` `{curve.protocol[:8]}`",
        number(len(values)),
        percent(min(values)),
        percent(max(values)),
        ABSENT if len(values) < 2 else number(100 * (max(values) - min(values))),
        ABSENT if np.isnan(noise) else f"± {100 * noise:.1f}",
    ]


def _noise_notes(repeated: list[Curve]) -> Iterator[str]:
    yield (
        "The noise of one evaluation is the standard deviation from sampling the same answers' distribution again on"
        " the same problems, computed from the samples of each problem. It does not hold how far these problems stand"
        " for others; the standard errors of the headline do."
    )
    if any(len(curve.baselines) == 1 for curve in repeated):
        yield "With `eval.baseline_repeats: 3` the grey band of the curve becomes the range of three evaluations."
    for curve in repeated:
        values = [point.accuracy for point in curve.baselines]
        inside = [point for point in curve.trained if min(values) <= point.accuracy <= max(values)]
        if len(values) > 1 and inside:
            steps = ", ".join(str(point.step) for point in inside)
            yield f"`eval/{curve.name}`: the evaluations after step {steps} lie inside the band of the base."


def _evaluated_at(curve: Curve) -> str:
    base = f"no update (× {len(curve.baselines)})" if curve.baselines else ""
    trained = f"step {step_ranges([point.step for point in curve.trained])}" if curve.trained else ""
    return ", ".join(part for part in (base, trained) if part)


def _size(curve: Curve) -> str:
    sizes = {
        (int(p.values.get("problems", 0)), int(p.values.get("samples", 0))) for p in [*curve.baselines, *curve.trained]
    }
    return ", ".join(f"{problems} × {samples}" for problems, samples in sorted(sizes))


def _settings(run: RunRecord) -> str:
    """The sets as the configuration has them now."""
    specs = run.option("eval.sets", [])
    if not specs:
        return "The configuration names no evaluation sets now."
    keys = ["name", "path", "samples", "limit", "temperature", "top_p", "max_new_tokens"]
    rows = [[ABSENT if spec.get(key) is None else str(spec[key]) for key in keys] for spec in specs]
    return "In the configuration as it is now:\n\n" + text_table(keys, rows)
