"""Figures 5.4 to 5.6 of the thesis: what wait-free backpropagation, staleness 5, top-1 % and all of
them gain on four hosts, how they scale, and what they use of accelerators and links.

Servers keep what p3kv's own placement gives them; the thesis's keep whole arrays, which its
heuristic balances as well (`experiments.thesis.placement`).

python -m experiments.thesis.optimizations
"""

from __future__ import annotations

import argparse
import math
from typing import List, Optional, Sequence

from experiments.campaign import options
from experiments.campaign.campaign import Campaign, Point, point
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure
from experiments.drawing.by_optimization import (
    BASELINE,
    COMPARED,
    MODELS,
    PERIOD,
    SCALED,
    SCALED_MODEL,
    draw,
    summarize,
    table_text,
)
from experiments.drawing.by_placement import HOSTS, RATIOS

_FEWER_HOSTS = 2
_PERIODIC = ("p3kv_stale", "p3kv_all")
_UNLIMITED = ("p3kv_topk", "p3kv_all")
"""Those that ask most of a machine."""
_QUICK = (BASELINE, "p3kv", "p3kv_all")
_ABOUT = {
    "figure": "thesis, figures 5.4 to 5.6: speed-ups by optimization and hosts, and utilization",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; total_s: the time in which the slowest "
    "worker has made all of them; compute_s: C, dilated; used: of the first host's link",
}


def points(chosen: argparse.Namespace, limited: bool) -> List[Point]:
    """A point for each model and system on four hosts, at the thesis's M/C, and on fewer behind the
    same links; or those without a limit."""
    made = []
    for model in chosen.models:
        for system in chosen.systems:
            if not limited and system not in _UNLIMITED:
                continue
            at = point(
                model, HOSTS, RATIOS[model] if limited else None, chosen.dilation[model],
                (system,), chosen.iterations,
            )  # fmt: skip
            if system in _PERIODIC:
                periods = math.ceil(chosen.iterations / PERIOD)
                at = at._replace(iterations=PERIOD * periods)
            made.append(at)
    fewer = [
        at._replace(hosts=_FEWER_HOSTS)
        for at in made
        if limited and at.model == SCALED_MODEL and at.systems[0] in SCALED
    ]
    return made + fewer


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures all systems in turn, first once without a limit on the links."""
    try:
        campaign.measure(points(chosen, limited=False), 1, chosen.retry)
        campaign.measure(points(chosen, limited=True), chosen.repetitions or 1, chosen.retry)
    finally:
        # The figure has shares of the rate only.
        for run in records.runs:
            run.pop("inbound_mbit_s", None)
            run.pop("outbound_mbit_s", None)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], MODELS)
    options.add_systems(parser, tuple(COMPARED))
    # A worker's first value travels as it is. One that exchanges seldom waits for it in the first
    # iteration after the first period.
    parser.set_defaults(warm_up=PERIOD + 1, iterations=PERIOD)
    chosen = options.parse(parser, argv, MODELS, MODELS[:1])
    chosen.systems = chosen.systems or (_QUICK if chosen.quick else tuple(COMPARED))
    measured_figure.make(
        "thesis_optimizations", _ABOUT, chosen, measure,
        lambda records: summarize(records.runs), table_text,
        lambda records: draw(records.summary, curves.remarks(records.runs, records.links)),
        traffic=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
