"""Colours that colour-blind readers tell apart, and text that stands out from its background."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from colocate_grpo.report.page import TEMPLATE
from colocate_grpo.report.style import DARK, LIGHT, PHASES, Theme

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISIONS = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ],
    "all colours": np.eye(3).tolist(),
}  # fmt: skip
# CIE 1976 difference: about 2.3 is just noticeable side by side.
CLEARLY_DIFFERENT = 15.0
THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)


@THEMES
@pytest.mark.parametrize("vision", VISIONS)
def test_neighbours_in_the_stack_and_the_first_curves_differ(theme: Theme, vision: str) -> None:
    assert len(theme.phases) == len(PHASES)
    # A phase that took no time is left out, so that the next but one is a neighbour too.
    stack = [*itertools.pairwise(theme.phases), *zip(theme.phases, theme.phases[2:], strict=False)]
    curves = itertools.combinations((*theme.series[:3], theme.text), 2)
    for first, second in (*stack, *curves):
        difference = np.linalg.norm(_lab(first, vision) - _lab(second, vision))
        assert difference > CLEARLY_DIFFERENT, (first, second, difference)


@THEMES
def test_pictures_stand_out_from_their_background(theme: Theme) -> None:
    assert _contrast(theme.text, theme.background) >= 7.0
    for colour in theme.series[:2]:  # also the colours of axis labels
        assert _contrast(colour, theme.background) >= 3.0


@pytest.mark.parametrize(("mode", "background"), [(0, LIGHT.background), (1, DARK.background)])
def test_the_page_is_readable_in_both_modes(mode: int, background: str) -> None:
    colours = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{(.*?)\}", TEMPLATE.read_text(), re.S)[mode]))
    assert colours["background"] == background
    for shade in ("background", "shade"):
        assert _contrast(colours["text"], colours[shade]) >= 7.0
        assert _contrast(colours["link"], colours[shade]) >= 4.5


def _linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _lab(colour: str, vision: str) -> np.ndarray:
    """CIELAB (D65) of a colour as someone with this vision sees it."""
    seen = np.clip(np.array(VISIONS[vision]) @ _linear(colour), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ seen / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _contrast(first: str, second: str) -> float:
    """Contrast ratio of WCAG 2."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    dark, light = sorted(float(weights @ _linear(colour)) for colour in (first, second))
    return (light + 0.05) / (dark + 0.05)
