"""Figure 5.4 of the thesis: what wait-free backpropagation and top-1 % gain on four hosts.

Servers keep what p3kv's own placement gives them; the thesis's keep whole arrays, which its
heuristic balances as well (`experiments.thesis.placement`).

python -m experiments.thesis.optimizations
"""

from __future__ import annotations

import argparse
from typing import List, Optional, Sequence

from experiments.campaign import options
from experiments.campaign.campaign import Campaign, Point, point
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure
from experiments.drawing.by_optimization import COMPARED, MODELS, draw, summarize, table_text
from experiments.drawing.by_placement import HOSTS, RATIOS

_UNLIMITED = ("p3kv_topk",)
_ABOUT = {
    "figure": "thesis, figure 5.4: single optimizations",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated",
}


def points(chosen: argparse.Namespace, limited: bool) -> List[Point]:
    """A point for each model, at the thesis's M/C, or those without a limit."""
    return [
        point(
            model, HOSTS, RATIOS[model] if limited else None, chosen.dilation[model],
            [one for one in chosen.systems if limited or one in _UNLIMITED], chosen.iterations,
        )
        for model in chosen.models
    ]  # fmt: skip


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures all systems in turn, first once without a limit on the links."""
    campaign.measure(points(chosen, limited=False), 1, chosen.retry)
    campaign.measure(points(chosen, limited=True), chosen.repetitions or 1, chosen.retry)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], MODELS)
    options.add_systems(parser, tuple(COMPARED))
    parser.set_defaults(warm_up=3)  # a worker's first value travels as it is
    chosen = options.parse(parser, argv, MODELS, MODELS[:1])
    chosen.systems = chosen.systems or tuple(COMPARED)
    measured_figure.make(
        "thesis_optimizations", _ABOUT, chosen, measure,
        lambda records: summarize(records.runs), table_text,
        lambda records: draw(records.summary, curves.remarks(records.runs, records.links)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
