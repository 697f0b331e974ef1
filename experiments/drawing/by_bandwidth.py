"""Throughput by bandwidth: p3kv's speed-ups over other systems, and its distance from the bound.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from experiments.drawing import curves
from experiments.drawing.curves import Spread
from experiments.models import load
from p3kv.report.forecast import bound

PAPER_GAINS = {"resnet50": 0.26, "inception_v3": 0.18, "vgg19": 0.66, "sockeye": 0.38}
"""What P3 section 5.2 reports as the greatest speed-up over its baseline."""

OVER = ("dist_sync_apart", "dist_sync", "mxnet_p3", "slicing", "horovod")
"""The systems that p3kv is compared with; the first is the paper's baseline."""

PEERS = ("dist_sync_apart", "dist_sync", "mxnet_p3")
"""MXNet's own stores; the first two have no slices."""


class Setup(NamedTuple):
    """What one panel of a figure is of."""

    model: str
    hosts: int
    dilation: float
    congestion_control: str


def setups(runs: Iterable[Mapping[str, Any]]) -> List[Setup]:
    """Returns the panels that there are runs for, models in the paper's order."""
    found = {Setup(*(run[field] for field in Setup._fields)) for run in runs}
    return sorted(found, key=lambda s: (curves.paper_order(s.model), s))


def ratio_of(setup: Setup, rate_mbit_s: float) -> float:
    """M/C at a link's rate."""
    model = load(setup.model)
    wire_s = bound.wire_time_s(model.size_bytes, setup.hosts, rate_mbit_s * 1e6)
    return wire_s / (model.compute_s * setup.dilation)


def bounds_s(setup: Setup, rate_mbit_s: float) -> Dict[str, float]:
    """Iteration times at a link's rate: of the best schedule, and of ideal first in, first out."""
    model = load(setup.model)
    arguments = (
        model.layer_bytes,
        [seconds * setup.dilation for seconds in model.forward_s],
        [seconds * setup.dilation for seconds in model.backward_s],
        setup.hosts,
        rate_mbit_s * 1e6,
    )
    return {"best": bound.lower_bound_s(*arguments), "fifo": bound.ideal_fifo_s(*arguments)}


def measured(runs: Iterable[Mapping[str, Any]], setup: Setup) -> Dict[str, Dict[float, Spread]]:
    """Returns iteration times by system and rate; without the unlimited runs."""
    found: Dict[str, Dict[float, Spread]] = {}
    mine = curves.select(runs, **setup._asdict())
    for system in curves.LOOKS:
        of = [run for run in mine if run["system"] == system and run["rate_mbit_s"] is not None]
        for rate in sorted({run["rate_mbit_s"] for run in of}):
            at_rate = [run for run in of if run["rate_mbit_s"] == rate]
            found.setdefault(system, {})[rate] = curves.iteration_s(at_rate)
    return found


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Returns for each setup p3kv's greatest speed-ups, and its distance from the bound.

    A speed-up of 0.26 is 26 % more throughput. `low` and `high` compare the extremes: the other
    system's fastest repetition with p3kv's slowest, and the other way round.
    """
    table = []
    for setup in setups(runs):
        times = measured(runs, setup)
        ours = times.get("p3kv", {})
        unlimited = curves.unlimited(runs, **setup._asdict())
        table.append(
            {
                **setup._asdict(),
                "paper_speed_up": PAPER_GAINS.get(setup.model),
                "speed_ups": {
                    system: _greatest(setup, times[system], ours)
                    for system in OVER
                    if set(times.get(system, {})) & set(ours)
                },
                "by_rate": [
                    {
                        "rate_mbit_s": rate,
                        "ratio": round(ratio_of(setup, rate), 3),
                        "over_bound": round(seconds.median / bounds_s(setup, rate)["best"] - 1, 4),
                        "over_best_peer": _over_best_peer(times, rate),
                    }
                    for rate, seconds in sorted(ours.items(), reverse=True)
                ],
                "slices_alone": {peer: _slices_alone(setup, times, peer) for peer in PEERS[:2]},
                "unlimited_efficiency": unlimited,
                "limited_by_this_machine": curves.limited(unlimited),
            }
        )
    return table


def _over_best_peer(times: Mapping[str, Mapping[float, Spread]], rate: float) -> Optional[float]:
    """How much more throughput p3kv has than the best of MXNet's own stores at a rate."""
    theirs = [times[peer][rate].median for peer in PEERS if rate in times.get(peer, {})]
    return round(min(theirs) / times["p3kv"][rate].median - 1, 4) if theirs else None


def _slices_alone(
    setup: Setup, times: Mapping[str, Mapping[float, Spread]], peer: str
) -> Dict[str, float]:
    """By M/C, how much more throughput p3kv's slices have without priorities than a peer."""
    theirs, ours = times.get(peer, {}), times.get("slicing", {})
    return {
        f"{ratio_of(setup, rate):.2g}": round(theirs[rate].median / ours[rate].median - 1, 4)
        for rate in sorted(set(theirs) & set(ours), reverse=True)
    }


def _greatest(
    setup: Setup, theirs: Mapping[float, Spread], ours: Mapping[float, Spread]
) -> Dict[str, float]:
    """The speed-up where it is greatest."""
    rate = max(set(theirs) & set(ours), key=lambda rate: theirs[rate].median / ours[rate].median)
    return {
        "speed_up": round(theirs[rate].median / ours[rate].median - 1, 4),
        "low": round(theirs[rate].low / ours[rate].high - 1, 4),
        "high": round(theirs[rate].high / ours[rate].low - 1, 4),
        "rate_mbit_s": rate,
        "ratio": round(ratio_of(setup, rate), 3),
    }


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns `summarize`'s table to be read: speed-ups beside the paper's, then the bound."""
    lines = ["", "Speed-up of p3kv over other systems, where it is greatest"]
    over = [system for system in OVER if any(system in row["speed_ups"] for row in table)]
    lines.append(f"{'':14}{'paper':>8}" + "".join(f"{system:>24}" for system in over))
    for row in table:
        paper = row["paper_speed_up"]
        cells = [f"{row['model']:14}", "       -" if paper is None else f"{paper:>8.0%}"]
        for system in over:
            gain = row["speed_ups"].get(system)
            cells.append(
                f"{'-':>24}"
                if gain is None
                else f"{gain['speed_up']:>+8.0%} at M/C = {gain['ratio']:<5.2g}"
            )
        lines.append(
            "".join(cells) + "  (limited by this machine)" * row["limited_by_this_machine"]
        )
    lines += ["The paper's are P3 over its baseline, here dist_sync_apart.", ""]
    lines.append(
        "By M/C: iterations of p3kv longer than the bound, and its throughput over that of"
    )
    lines.append("the best of MXNet's own stores")
    for row in table:
        for what, field in (("bound", "over_bound"), ("best peer", "over_best_peer")):
            cells = "".join(
                f"{at['ratio']:>8.2g}: {at[field]:>+6.1%}"
                for at in row["by_rate"]
                if at[field] is not None
            )
            lines.append(f"{row['model']:14}{what:9}{cells or '  not measured'}")
        lines.append(
            " " * 16 + curves.unlimited_text(row["unlimited_efficiency"]).replace("\n", " ")
        )
    lines += ["", "By M/C: throughput of slices without priorities over"]
    for row in table:
        for peer, gains in row["slices_alone"].items():
            cells = "".join(f"{ratio:>8}: {gain:>+6.1%}" for ratio, gain in gains.items())
            lines.append(f"{row['model']:14}{peer:16}{cells or '  not measured'}")
    return "\n".join(lines)
