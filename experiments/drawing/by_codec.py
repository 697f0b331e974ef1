"""Efficiency and processor time of codecs by M/C, and from where on each pays.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.campaign.codec_cost import Cost
from experiments.drawing import curves, output
from experiments.drawing.by_bandwidth import ratio_of, setups
from experiments.drawing.curves import Spread
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from p3kv.report.forecast import bound

EXACT = "p3kv"
"""What the others are compared with."""
PEERS = ("dist_sync", "mxnet_p3", "dist_sync_2bit")
CODECS = (
    "p3kv_float16", "p3kv_bfloat16", "p3kv_2bit", "p3kv_topk_gradients", "p3kv_topk", "p3kv_dgc",
    "p3kv_dgc_topk",
)  # fmt: skip
COMPARED = (EXACT, *PEERS, *CODECS)
TARGETS = {"p3kv_float16": 0.47, "p3kv_topk": 0.90, "p3kv_dgc_topk": 0.95}
"""At `TARGET_RATIO`. Where values travel as they are, nothing passes 2 by M/C."""
TARGET_RATIO = 4.0
_PAPERS_COMPUTE_S = {"resnet50": 0.305, "vgg19": 0.48}
"""C on the accelerator of P3's evaluation, before `experiments.models` stretches it."""
_HOSTS = 4
_FASTER = 1.02


def summarize(
    runs: Sequence[Mapping[str, Any]], alone: Mapping[str, Mapping[str, float]]
) -> Dict[str, Any]:
    """Rows of what was measured at each M/C, and where each codec pays.

    `alone` are codecs' costs by system, as `experiments.campaign.codec_cost.Cost` has them.
    """
    panels = []
    for setup in setups(runs):
        of = curves.select(runs, **setup._asdict())
        rates = {run["rate_mbit_s"] for run in of} - {None}
        for rate in sorted(rates, reverse=True):
            at_rate = [run for run in of if run["rate_mbit_s"] == rate]
            panels.append(
                {
                    **setup._asdict(),
                    "rate_mbit_s": rate,
                    "ratio": round(ratio_of(setup, rate), 2),
                    "systems": _systems(at_rate),
                    "unlimited_efficiency": curves.unlimited(of),
                }
            )
    pays = {
        system: _pays(system, panels, Cost(**alone[system])) for system in CODECS if system in alone
    }
    return {"panels": panels, "alone": dict(alone), "pays": pays}


def _systems(runs: Sequence[Mapping[str, Any]]) -> Dict[str, Dict[str, Any]]:
    found = {}
    for system in COMPARED:
        of = [run for run in runs if run["system"] == system]
        if of:
            efficiency = curves.throughput(curves.spread_s(of), of[0]["compute_s"])
            cpu = Spread.of([curves.cpu_s_per_gb(run) for run in of])
            found[system] = {
                "efficiency": efficiency.rounded(),
                "cpu_s_per_gb": cpu.rounded(),
                "repetitions": len(of),
            }
    return found


def _pays(system: str, panels: Sequence[Mapping[str, Any]], alone: Cost) -> Dict[str, Any]:
    """Where a codec is faster than exact: as measured, and by its processor time alone.

    By that, an iteration takes at least as long as its slower process encodes and decodes, and an
    exact one as long as the wire is busy.
    """
    slowest_s = max(alone)
    exact_wire_s = bound.wire_time_s(1e9, _HOSTS, 1e9)
    by_model = {
        model: round(max(1.0, slowest_s * load(model).size_bytes / 1e9 / compute_s), 2)
        for model, compute_s in _PAPERS_COMPUTE_S.items()
    }
    return {
        "measured_from": {
            model: _measured_from(system, [one for one in panels if one["model"] == model])
            for model in dict.fromkeys(one["model"] for one in panels)
        },
        "on_the_papers_accelerator_from": by_model,
        "below_gbit_s": round(exact_wire_s / slowest_s, 1),
    }


def _measured_from(system: str, panels: Sequence[Mapping[str, Any]]) -> Optional[float]:
    """The M/C from which on a codec's iterations are at least 2 % shorter than exact ones.

    Between two that were measured, gains grow with the logarithm. The least that was measured:
    there already, and maybe below. None: at none of them.
    """
    gains = sorted(
        (one["ratio"], _gain(one["systems"], system) / _FASTER)
        for one in panels
        if {system, EXACT} <= set(one["systems"])
    )
    before: Optional[Tuple[float, float]] = None
    for ratio, gain in gains:
        if gain >= 1:
            if before is None:
                return ratio
            part = math.log(1 / before[1]) / math.log(gain / before[1])
            return round(before[0] * (ratio / before[0]) ** part, 2)
        before = (ratio, gain)
    return None


def _gain(systems: Mapping[str, Mapping[str, Any]], system: str) -> float:
    ours, exact = (systems[one]["efficiency"]["median"] for one in (system, EXACT))
    return ours / exact


def table_text(summary: Mapping[str, Any]) -> str:
    """`summarize`'s numbers as text."""
    lines = []
    for one in summary["panels"]:
        lines.append(
            f"\n{curves.TITLES[one['model']]}, {one['hosts']} hosts, M/C = {one['ratio']:g}, "
            f"{one['rate_mbit_s']:g} Mbit/s: efficiency, times exact, CPU s/GB"
        )
        for system, found in one["systems"].items():
            taken = found["efficiency"]
            lines.append(
                f"{SYSTEMS[system].title:28} {taken['median']:.3f} ({taken['low']:.3f} to "
                f"{taken['high']:.3f})"
                + (f" x {_gain(one['systems'], system):.2f}" if EXACT in one["systems"] else "")
                + f" {found['cpu_s_per_gb']['median']:8.2f}"
                + _judged(one["ratio"], system, taken["median"])
            )
        free = one["unlimited_efficiency"]
        lines.append(curves.unlimited_text(free).replace("\n", " "))
    lines.append("\nprocessor seconds a GB of gradients, alone: worker, server; pays from M/C")
    for system, alone in summary["alone"].items():
        pays = summary["pays"].get(system)
        lines.append(
            f"{SYSTEMS[system].title:28} {alone['worker_s']:6.2f} {alone['server_s']:6.2f}"
            + (
                f"  measured {pays['measured_from']}, on the paper's accelerator "
                f"{pays['on_the_papers_accelerator_from']}, below {pays['below_gbit_s']:g} Gbit/s"
                if pays
                else ""
            )
        )
    return "\n".join(lines)


def _judged(ratio: float, system: str, efficiency: float) -> str:
    if system not in TARGETS or abs(ratio / TARGET_RATIO - 1) > 0.01:
        return ""
    reached = "reached" if efficiency >= TARGETS[system] else "MISSED"
    return f"  {reached}: at least {TARGETS[system]:g}"


def draw(summary: Mapping[str, Any], said: Sequence[str]) -> Figure:
    """Bars of efficiency: a row of panels for each model, a panel for each M/C."""
    output.style()
    panels = summary["panels"]
    rows = list(dict.fromkeys(one["model"] for one in panels))
    columns = sorted({one["ratio"] for one in panels})
    figure, axes = plt.subplots(
        len(rows), len(columns), figsize=(1.6 + 3.2 * len(columns), 0.5 + 2.9 * len(rows)),
        squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for axis in axes.flat:
        axis.set_visible(False)
    for one in panels:
        _draw_panel(axes[rows.index(one["model"]), columns.index(one["ratio"])], one)
    for axis in axes[-1]:
        axis.set_xlabel("efficiency: C by the time of an iteration", fontsize=8)
    curves.foot(figure, said)
    return figure


def _draw_panel(axis: Axes, one: Mapping[str, Any]) -> None:
    axis.set_visible(True)
    for place, system in enumerate(COMPARED):
        found = one["systems"].get(system)
        if found is None:
            continue
        taken = Spread(**found["efficiency"])
        drawn = axis.barh(
            place, taken.median, 0.75, color=_colour(system),
            xerr=[[taken.median - taken.low], [taken.high - taken.median]],
        )  # fmt: skip
        axis.bar_label(drawn, [f"{taken.median:.2f}"], fontsize=7, padding=2)
    axis.set_yticks(range(len(COMPARED)), [SYSTEMS[system].title for system in COMPARED])
    axis.tick_params(axis="y", labelsize=7)
    axis.set_ylim(len(COMPARED) - 0.5, -0.5)
    axis.set_xlim(0, 1.15)
    axis.grid(axis="x", alpha=0.3)
    axis.grid(visible=False, axis="y")
    axis.set_title(f"{curves.TITLES[one['model']]}, M/C = {one['ratio']:g}", fontsize=9)


def _colour(system: str) -> str:
    if system == EXACT:
        return output.COLOURS["p3"]
    return output.COLOURS["baseline"] if system in PEERS else "#009E73"
