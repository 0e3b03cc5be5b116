"""Colours and line styles of the pictures: the Okabe-Ito palette, told apart by colour-blind readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PHASES = ("rollout", "log-probs", "training", "push", "sleep/wake", "save", "evaluation", "idle")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Theme:
    """One appearance of the pictures; `series` and `phases` keep their order in both."""

    name: str
    background: str
    text: str
    grid: str
    band: str
    series: tuple[str, ...]
    phases: tuple[str, ...]

    def settings(self) -> dict[Any, Any]:
        """matplotlib's rcParams."""
        return {
            "figure.facecolor": self.background,
            "axes.facecolor": self.background,
            "savefig.facecolor": self.background,
            "text.color": self.text,
            "axes.labelcolor": self.text,
            "axes.edgecolor": self.text,
            "xtick.color": self.text,
            "ytick.color": self.text,
            "axes.grid": True,
            "grid.color": self.grid,
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "axes.labelsize": 10.5,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "font.family": "DejaVu Sans",
            "text.parse_math": False,
            # Drawn letters look the same where the font is missing.
            "svg.fonttype": "path",
            # Element ids follow the content, so that the same run gives the same file.
            "svg.hashsalt": "colocate-grpo",
        }


LIGHT = Theme(
    name="light",
    background="#ffffff",
    text="#24292f",
    grid="#e3e6ea",
    band="#8c959f",
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9"),
    phases=("#0072b2", "#56b4e9", "#d55e00", "#009e73", "#f0e442", "#cc79a7", "#e69f00", "#57606a"),
)
DARK = Theme(
    name="dark",
    background="#0d1117",
    text="#e6edf3",
    grid="#2a313a",
    band="#8b949e",
    series=("#56b4e9", "#e69f00", "#7ee787", "#e39ac4", "#f0e442", "#4d9de0"),
    phases=("#3d8fd1", "#8fd0f5", "#e2702a", "#2fc296", "#f0e442", "#e39ac4", "#e69f00", "#6e7681"),
)
