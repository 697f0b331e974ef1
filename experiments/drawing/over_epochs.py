"""Validation accuracy over epochs and over time, as bands over settings of hyper-parameters."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import output
from experiments.training.encodings import ENCODINGS

EXACT, DGC = "exact", "dgc"
COMPARED = {EXACT: output.COLOURS["p3"], DGC: output.COLOURS["emphasis"]}
"""Encodings by name, and their colours."""
PAPER_LOSS = 0.004
"""What DGC loses of the accuracy in the mean (P3 section 5.5)."""


def summarize(runs: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """By encoding the accuracy over epochs and the seconds of an epoch by rate; and DGC's loss.

    Each epoch has the worst, mean and best accuracy of all settings. The first epoch of a run with
    a rate is not counted: slices find their size in it.
    """
    summary: Dict[str, Any] = {}
    finals: Dict[str, Dict[int, float]] = {}
    for encoding in COMPARED:
        of = [run for run in runs if run["encoding"] == encoding]
        trained = [run for run in of if run["rate_mbit_s"] is None]
        accuracies = [[one["accuracy"] for one in run["validated"]] for run in trained]
        finals[encoding] = {run["setting"]: acc[-1] for run, acc in zip(trained, accuracies)}
        summary[encoding] = {
            "accuracy": [
                [min(epoch), statistics.mean(epoch), max(epoch)] for epoch in zip(*accuracies)
            ],
            "final": finals[encoding],
            "epoch_s": {
                f"{run['rate_mbit_s']:g}": statistics.median(run["epoch_s"][1:])
                for run in of
                if run["rate_mbit_s"] is not None
            },
        }
    lost = [
        accuracy - finals[DGC][setting]
        for setting, accuracy in finals[EXACT].items()
        if setting in finals[DGC]
    ]
    summary["dgc_loses"] = {"mean": statistics.mean(lost), "by_setting": lost}
    return summary


def table_text(summary: Mapping[str, Any]) -> str:
    """`summarize`'s numbers as text."""
    lines = []
    for encoding in COMPARED:
        of = summary[encoding]
        low, mean, high = of["accuracy"][-1]
        times = ", ".join(f"{s:.2f} s at {rate} Mbit/s" for rate, s in of["epoch_s"].items())
        lines.append(
            f"{encoding:<6} accuracy {mean:.4f} ({low:.4f} to {high:.4f}) after "
            f"{len(of['accuracy'])} epochs; an epoch takes {times}"
        )
    lost = summary["dgc_loses"]
    by_setting = ", ".join(f"{one:+.4f}" for one in lost["by_setting"])
    lines.append(
        f"DGC loses {lost['mean']:.4f} in the mean (by setting {by_setting}); the paper's "
        f"{PAPER_LOSS}"
    )
    return "\n".join(lines)


def draw(summary: Mapping[str, Any], trained: str, workers: int) -> Figure:
    """Draws accuracy over epochs, and a panel for each rate with accuracy over time."""
    output.style()
    rates: List[str] = list(summary[EXACT]["epoch_s"])
    panels = 1 + len(rates)
    figure, (axes,) = plt.subplots(1, panels, figsize=(4.2 * panels, 3.6), squeeze=False)
    for axis, rate in zip(axes, [None, *rates]):
        for encoding in COMPARED:
            of = summary[encoding]
            _draw_band(axis, encoding, of["accuracy"], of["epoch_s"][rate] if rate else 1.0)
        axis.set_xlabel("time (seconds)" if rate else "epochs")
        axis.set_title(f"links of {rate} Mbit/s" if rate else f"{trained}, {workers} workers")
    lost = summary["dgc_loses"]["mean"]
    axes[0].text(
        0.02, 0.98, f"at the end DGC loses {lost:.4f}; the paper, with\nResNet-110 and CIFAR-10 "
        f"in 160 epochs: {PAPER_LOSS}", transform=axes[0].transAxes, fontsize=7, va="top",
    )  # fmt: skip
    axes[0].set_ylabel("validation accuracy")
    axes[0].legend(fontsize=7, loc="lower right")
    figure.supxlabel(
        "Bands: worst to best of the settings of hyper-parameters; lines: the mean. Accuracy by "
        "epoch is from runs without a limit on the links (a limit changes how sums are rounded, "
        "and of which slices DGC\nselects); the time of an epoch is from the same training on "
        "links with the limit, after its first epoch. DGC encodes gradients; values travel whole.",
        fontsize=7,
        color="#555555",
    )
    return figure


def _draw_band(
    axis: Axes, encoding: str, accuracy: Sequence[Sequence[float]], epoch_s: float
) -> None:
    places = [epoch_s * (1 + epoch) for epoch in range(len(accuracy))]
    low, mean, high = zip(*accuracy)
    colour = COMPARED[encoding]
    axis.fill_between(places, low, high, color=colour, alpha=0.25, linewidth=0)
    axis.plot(places, mean, color=colour, linewidth=1.2, label=ENCODINGS[encoding].title)
    # The first epochs are far below, and hide what the last ones differ by.
    axis.set_ylim(0.9, 1.0)
