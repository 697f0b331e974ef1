"""What measured figures make of their runs: medians, spreads, flags, and one look for each system.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

import statistics
import textwrap
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.campaign.records import Records
from experiments.drawing import output
from experiments.emulation.systems import SYSTEMS
from experiments.models import MODELS, load

CARRIED = 0.98
"""The efficiency without a limit from which on a machine carries a configuration."""

_FOOT_CHARACTERS_PER_INCH = 19

EMULATED = (
    "Computation is emulated by timed operations, and slowed by the same factor as the links, so "
    "that this machine's cores can carry all hosts. Arrays, stores and traffic are real."
)

TITLES = {
    "resnet50": "ResNet-50",
    "inception_v3": "Inception-v3",
    "vgg19": "VGG-19",
    "sockeye": "Sockeye",
    "googlenet": "GoogLeNet",
    "resnet110": "ResNet-110",
    "inception_v4": "Inception-v4",
    "gpt2_small": "GPT-2 small",
    "snn": "SNN",
    "three_layers": "three layers",
}


class Look(NamedTuple):
    """How one system is drawn in all figures. Okabe and Ito's colours, as in `output`."""

    colour: str
    marker: str


LOOKS = {
    "dist_sync_apart": Look(output.COLOURS["baseline"], "s"),
    "dist_sync": Look("#CC79A7", "D"),
    "mxnet_p3": Look("#009E73", "^"),
    "slicing": Look(output.COLOURS["slicing"], "v"),
    "horovod": Look("#56B4E9", "X"),
    "p3kv": Look(output.COLOURS["p3"], "o"),
    "p3kv_torch": Look(output.COLOURS["p3"], "o"),
    "ddp_25mb": Look(output.COLOURS["baseline"], "s"),
    "ddp_5mb": Look("#CC79A7", "D"),
    "ddp_1mb": Look("#009E73", "^"),
    "fsdp2": Look("#56B4E9", "X"),
}


class Spread(NamedTuple):
    """Median, least and greatest value of several."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def rounded(self, digits: int = 4) -> Dict[str, float]:
        """By name, as tables have them."""
        return {name: round(value, digits) for name, value in self._asdict().items()}


def paper_order(model: str) -> int:
    """What sorts models as the paper has them, and others behind."""
    return MODELS.index(model) if model in MODELS else len(MODELS)


def select(runs: Iterable[Mapping[str, Any]], **fields: Any) -> List[Mapping[str, Any]]:
    """Returns the runs that came to their end and have these values."""
    return [
        run
        for run in runs
        if "iteration_s" in run and all(run[name] == value for name, value in fields.items())
    ]


def iteration_s(runs: Sequence[Mapping[str, Any]]) -> Spread:
    """The time of an iteration, of one run at least: over repetitions, of each one's median."""
    return Spread.of([statistics.median(run["iteration_s"]) for run in runs])


def spread_s(runs: Sequence[Mapping[str, Any]]) -> Spread:
    """As `iteration_s`; of a single run, over its iterations."""
    return iteration_s(runs) if len(runs) > 1 else Spread.of(runs[0]["iteration_s"])


def throughput(seconds: Spread, samples: float) -> Spread:
    """Samples a second, of `samples` in an iteration."""
    return Spread(samples / seconds.median, samples / seconds.high, samples / seconds.low)


def speed_up(runs: Sequence[Mapping[str, Any]]) -> Spread:
    """Iterations a second times hosts, by those of one machine: it computes and sends nothing."""
    return throughput(spread_s(runs), runs[0]["compute_s"] * runs[0]["hosts"])


def cpu_s_per_gb(run: Mapping[str, Any]) -> float:
    """Processor time of all processes for each gigabyte that a worker synchronises."""
    size_bytes = load(run["model"]).size_bytes
    return run["cpu_s"] / (len(run["iteration_s"]) * run["hosts"] * size_bytes / 1e9)


def samples(model: str, hosts: int) -> int:
    """What all hosts together process in an iteration."""
    return load(model).batch_size * hosts


def unlimited(runs: Iterable[Mapping[str, Any]], **fields: Any) -> Dict[str, float]:
    """By system: efficiency, C by the time of an iteration, where links had no limit."""
    found = select(runs, rate_mbit_s=None, **fields)
    efficiencies = {}
    for system in SYSTEMS:
        of = [run for run in found if run["system"] == system]
        if of:
            efficiencies[system] = round(of[0]["compute_s"] / iteration_s(of).median, 4)
    return efficiencies


def limited(efficiencies: Mapping[str, float]) -> bool:
    """Whether it is this machine, and not the network, that slows a configuration."""
    return any(value < CARRIED for value in efficiencies.values())


def unlimited_text(efficiencies: Mapping[str, float]) -> str:
    """What `unlimited` found, for a plot or a table."""
    if not efficiencies:
        return "not measured without a limit"
    values = ", ".join(f"{system} {value:.3f}" for system, value in efficiencies.items())
    if limited(efficiencies):
        return f"limited by this machine:\nefficiency without a limit: {values}"
    return f"efficiency without a limit: {values}"


def remarks(runs: Iterable[Mapping[str, Any]], links: Iterable[Mapping[str, Any]]) -> List[str]:
    """Returns sentences on what went wrong while measuring; none when nothing did."""
    said = []
    for run in runs:
        if not run.get("failures"):
            continue
        rate = "no limit" if run["rate_mbit_s"] is None else f"{run['rate_mbit_s']:g} Mbit/s"
        where = f"{run['system']}, {run['model']}, {run['hosts']} hosts, {rate}"
        if "iteration_s" in run:
            said.append(f"succeeded at the second attempt only: {where}")
        else:
            said.append(f"failed: {where}: {last_line(run['failures'][-1])}")
    latest = {(check["hosts"], check["rate_mbit_s"]): check for check in links}
    said += [
        f"links {check['most_off']:.1%} off what they should carry: {hosts} hosts, {rate:g} Mbit/s"
        for (hosts, rate), check in latest.items()
        if check["flagged"]
    ]
    return said


def foot(figure: Figure, said: Sequence[str]) -> None:
    """Writes below a figure that computation is emulated, and how many remarks there are."""
    text = EMULATED
    if said:
        text += f" {len(said)} remark{'s' * (len(said) > 1)} on runs or links: see the numbers."
    lines = textwrap.fill(text, int(_FOOT_CHARACTERS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(lines, fontsize=7, color="#555555")


def draw_spread(
    axis: Axes,
    system: str,
    places: Sequence[float],
    values: Sequence[Spread],
    line: str = "-",
    label: Optional[str] = None,
) -> None:
    """Draws medians as a system's markers, with bars from the least to the greatest value."""
    look = LOOKS[system]
    axis.errorbar(
        places,
        [value.median for value in values],
        yerr=[
            [value.median - value.low for value in values],
            [value.high - value.median for value in values],
        ],
        color=look.colour,
        marker=look.marker,
        markersize=4,
        linewidth=1.2,
        linestyle=line,
        capsize=2.5,
        label=label,
    )


def legend(axes: Iterable[Axes], into: Axes, **how: Any) -> None:
    """Puts what any of the axes labels into one legend."""
    handles: Dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    how = {"fontsize": 7, "framealpha": 0.9, **how}
    into.legend(handles.values(), handles.keys(), **how)


def finish(records: Records, figure: Figure) -> None:
    """Writes the figure beside its numbers, and prints remarks and where both are."""
    for said in remarks(records.runs, records.links):
        print(said)
    picture = records.path.with_suffix(".png")
    figure.savefig(picture)
    plt.close(figure)
    print(f"{records.path}\n{picture}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"
