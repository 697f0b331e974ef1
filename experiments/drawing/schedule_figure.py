"""The figures that show schedules: the simulator's above those of measured traces."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from experiments.campaign import machine
from experiments.campaign.measure import measure
from experiments.campaign.options import arguments
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing import curves, output
from experiments.drawing.schedule import ACCELERATOR, ROWS, measured, simulated
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from p3kv.report.forecast import Model, bound

HOSTS = 2
_CONGESTION_CONTROL = "cubic"
_WARM_UP, _ITERATIONS, _QUICK_ITERATIONS = 3, 15, 4
# Paul Tol's, which colour-blind readers can tell apart; no system has one of them.
_LAYER_COLOURS = ("#88CCEE", "#DDCC77", "#CC6677")
_BAR_HEIGHT = 0.72
_WAIT: Dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "#999999",
    "hatch": "////",
    "linewidth": 0.0,
}


class Case(NamedTuple):
    """What one column of a figure shows: `system` is one of p3kv's two."""

    title: str
    system: str
    slice_elems: int

    @property
    def priority(self) -> bool:
        return SYSTEMS[self.system].environment.get("P3KV_PRIORITIES") != "0"


class Example(NamedTuple):
    """A network, and a link on which its wire time is `ratio` times its computation."""

    model: str
    ratio: float
    cases: Sequence[Case]

    def link_bit_s(self, model: Model) -> float:
        return bound.link_for_ratio_bit_s(self.ratio, model.compute_s, model.size_bytes, HOSTS)


def numbers(example: Example, iterations: int, measurement: bool = True) -> Dict[str, Any]:
    """Simulates and, with `measurement`, measures `iterations` of every case.

    Measuring needs what `experiments.cluster` needs; raises its ClusterError and `RunFailed`.
    """
    model = load(example.model)
    link_bit_s = example.link_bit_s(model)
    cases: List[Dict[str, Any]] = []
    for case in tqdm(example.cases, desc=example.model, unit="case"):
        ideal = simulated(model, case.slice_elems, case.priority, HOSTS, link_bit_s)
        sources = {"simulated": ideal.numbers}
        if measurement:
            sources["measured"] = _measured(case, model, link_bit_s, iterations)
        cases.append({**case._asdict(), **sources})
    return {
        "computation": curves.EMULATED,
        "machine": machine.describe(_CONGESTION_CONTROL) if measurement else None,
        "model": model.name,
        "layer_bytes": model.layer_bytes,
        "unit_s": model.forward_s[0],
        "compute_s": model.compute_s,
        "hosts": HOSTS,
        "link_mbit_s": link_bit_s / 1e6,
        "cases": cases,
    }


def _measured(case: Case, model: Model, link_bit_s: float, iterations: int) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as traces, Cluster(
        HOSTS, link_bit_s / 1e6, _CONGESTION_CONTROL
    ) as cluster:
        run = measure(
            cluster, case.system, model.name, warm_up=_WARM_UP, iterations=iterations, spans=True,
            P3KV_SLICE_SIZE=case.slice_elems, P3KV_TRACE=traces,
        )  # fmt: skip
        found = measured(model, run, Path(traces)).numbers
    return {**found, "iteration_s": run.iteration_s}


def report(found: Dict[str, Any]) -> str:
    """The delays in words, a line for each schedule."""
    lines = []
    for case in found["cases"]:
        for source in ("simulated", "measured"):
            if source in case:
                delay_s, waiting_s = (
                    case[source][f"median_{name}_s"] for name in ("delay", "waiting")
                )
                lines.append(
                    f"{case['title']}, {source}: {delay_s:.3f} s ({delay_s / found['unit_s']:.2f} "
                    f"units) from backward to forward, {waiting_s:.3f} s "
                    f"({waiting_s / found['unit_s']:.2f} units) of waiting in an iteration of "
                    f"{found['compute_s'] + waiting_s:.3f} s"
                )
    return "\n".join(lines)


def draw(found: Dict[str, Any], title: str) -> Figure:
    """Draws what `numbers` returned: a column for each case, the simulator above the trace."""
    output.style()
    cases = found["cases"]
    sources = [source for source in ("simulated", "measured") if source in cases[0]]
    figure, axes = plt.subplots(
        len(sources),
        len(cases),
        figsize=(5.2 * len(cases), 0.8 + 2.5 * len(sources)),
        sharey=True,
        squeeze=False,
    )
    for row, source in zip(axes, sources):
        # The same scale in a row, to compare columns, and in units, to compare rows.
        unit_s = found["unit_s"]
        units = (
            max(bar["end_s"] for case in cases for at in sources for bar in case[at]["bars"])
            / unit_s
        )
        for axis, case in zip(row, cases):
            _draw_schedule(axis, case[source], unit_s, unit_s if source == "simulated" else 1.0)
            axis.set_xlim(0, units * (1 if source == "simulated" else unit_s))
            axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
            axis.set_title(_caption(case, source, found), loc="left")
            axis.set_xlabel(
                "time (one layer's pass = 1)" if source == "simulated" else "time (seconds)"
            )
    handles = [
        Patch(color=_LAYER_COLOURS[index], label=f"layer {index + 1}, {size / 1e6:.3g} MB")
        for index, size in enumerate(found["layer_bytes"])
    ]
    handles.append(Patch(label="the accelerator waits", **_WAIT))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    emulated = " (computation is emulated by timed operations)" if "measured" in sources else ""
    figure.suptitle(title + emulated, fontsize=10)
    return figure


def _caption(case: Dict[str, Any], source: str, found: Dict[str, Any]) -> str:
    waiting_s = case[source]["median_waiting_s"]
    iteration_s = found["compute_s"] + waiting_s
    unit_s = found["unit_s"]
    if source == "simulated":
        waits = f"waits {waiting_s / unit_s:.1f} of {iteration_s / unit_s:.1f} units"
    else:
        waits = f"waits {waiting_s:.2f} s of {iteration_s:.2f} s"
    return f"{case['title']}, {source}: {waits}"


def _draw_schedule(axis: Axes, found: Dict[str, Any], unit_s: float, axis_unit_s: float) -> None:
    for bar in found["bars"]:
        row = ROWS.index(bar["row"])
        start, end = bar["start_s"] / axis_unit_s, bar["end_s"] / axis_unit_s
        forward = bar["what"] == "forward"
        axis.barh(
            row,
            end - start,
            left=start,
            height=_BAR_HEIGHT,
            color=_LAYER_COLOURS[bar["layer"]],
            edgecolor="white",
            linewidth=0.4,
            alpha=0.55 if forward else 1.0,
        )
        if bar["row"] == ACCELERATOR:
            name = f"{'f' if forward else 'b'}{bar['layer'] + 1}"
        elif bar["end_s"] - bar["start_s"] > 0.4 * unit_s:
            name = str(bar["layer"] + 1)
        else:
            continue
        axis.text((start + end) / 2, row, name, ha="center", va="center", fontsize=7)
    computing = [bar for bar in found["bars"] if bar["row"] == ACCELERATOR]
    for before, after in zip(computing, computing[1:]):
        wait_s = after["start_s"] - before["end_s"]
        if wait_s > 0.05 * unit_s:
            start, length = before["end_s"] / axis_unit_s, wait_s / axis_unit_s
            axis.barh(ROWS.index(ACCELERATOR), length, left=start, height=_BAR_HEIGHT, **_WAIT)
    axis.set_yticks(range(len(ROWS)), ROWS)
    axis.set_ylim(len(ROWS) - 0.5, -0.5)
    axis.grid(axis="x")
    axis.grid(axis="y", visible=False)


def main(name: str, example: Example, title: str, argv: Optional[Sequence[str]] = None) -> None:
    """Runs the experiment that the command line asks for; leaves `name`.json and `name`.png.

    What is not a full run has a name of its own, and leaves the full run's files as they are.
    """
    parser = arguments(title)
    parser.add_argument(
        "--quick", action="store_true", help=f"{_QUICK_ITERATIONS} iterations, not {_ITERATIONS}"
    )
    parser.add_argument(
        "--simulate-only", action="store_true", help="measure nothing: needs no throttled cluster"
    )
    options = parser.parse_args(argv)
    problem = None if options.simulate_only else missing_requirements()
    if problem is not None:
        raise SystemExit(f"{problem}; or choose --simulate-only")
    iterations = _QUICK_ITERATIONS if options.quick else _ITERATIONS
    found = numbers(example, iterations, measurement=not options.simulate_only)
    print(report(found))
    if options.quick or options.simulate_only:
        name += "-simulated" if options.simulate_only else "-quick"
    output.save(options.output, name, found, draw(found, title))
