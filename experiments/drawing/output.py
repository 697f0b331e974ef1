"""How the pictures of experiments look, and how one is saved beside its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import matplotlib

matplotlib.use("Agg")  # experiments run on hosts without a display
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart: one for one thing in all
# figures.
COLOURS: Dict[str, str] = {
    "plain": "#0072B2",
    "emphasis": "#D55E00",
    "baseline": "#999999",
    "slicing": "#E69F00",
    "p3": "#0072B2",
    "bound": "#000000",
}

_STYLE = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.alpha": 0.3,
    "savefig.dpi": 150,
}


def style() -> None:
    """Gives figures drawn from here on the look of all of them."""
    plt.rcParams.update(_STYLE)


def save(folder: Path, name: str, numbers: Any, figure: Figure) -> None:
    """Writes `numbers` to `name`.json and `figure` to `name`.png in `folder`, and says so."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.json"
    data.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    picture = folder / f"{name}.png"
    figure.savefig(picture)
    plt.close(figure)
    print(f"{data}\n{picture}")
