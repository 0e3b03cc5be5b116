"""How the evaluations were done, and the noise they have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from colocate_grpo.report.accuracy import Curve, curves, measure
from colocate_grpo.report.markdown import ABSENT, number, percent, step_ranges, table, text_table, value_text
from colocate_grpo.report.record import RunRecord
from colocate_grpo.report.statistics import sampling_noise

PART_LABELS = {
    "path": "data file",
    "problems": "problems",
    "samples": "samples a problem",
    "temperature": "temperature",
    "top_p": "top-p",
    "max_new_tokens": "token limit of an answer",
    "system": "system prompt",
    "prompt_suffix": "prompt suffix",
    "chat_template_kwargs": "options of the chat template",
    "first_prompt": "first prompt as rendered",
    "data": "fingerprint of prompts and answers as rendered",
    "reward": "grader and its options",
    "grader": "version of the grader",
}


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
    names = list(dict.fromkeys(curve.name for curve in found))
    for name in names:
        parts += _set_part(run, [curve for curve in found if curve.name == name])
    return "\n\n".join(parts)


def what_differs(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """`samples a problem 4 → 8; temperature 0.6 → 1`, of the recorded parts of two protocols."""
    if old is None or new is None:
        return "what differs is not recorded"
    keys = [key for key in {**PART_LABELS, **old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"{_label(key)} {value_text(old.get(key))} → {value_text(new.get(key))}" for key in keys)


def _set_part(run: RunRecord, found: Sequence[Curve]) -> Iterator[str]:
    """What one set's protocols are made of, and what changed from each to the next."""
    name = found[0].name
    recorded = [run.protocols.get((name, curve.protocol)) for curve in found]
    for (before, old), (after, new) in itertools.pairwise(zip(found, recorded, strict=True)):
        yield (
            f"**The protocol of `eval/{name}` changed during this run**, from `{before.protocol}` to"
            f" `{after.protocol}`: {what_differs(old, new)}. Its parts are told apart everywhere."
        )
    known = [(curve.protocol, parts) for curve, parts in zip(found, recorded, strict=True) if parts is not None]
    if not known:
        yield f"What the protocol of `eval/{name}` is made of is not recorded."
        return
    keys = [key for key in PART_LABELS if any(key in parts for _, parts in known)]
    rows = [[_label(key), *(value_text(parts.get(key)) for _, parts in known)] for key in keys]
    yield text_table([f"`eval/{name}`", *(f"`{protocol}`" for protocol, _ in known)], rows)


def _label(key: str) -> str:
    return PART_LABELS.get(key, key)


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
