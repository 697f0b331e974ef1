"""Figures 5.1 to 5.3 of the thesis: placements of whole arrays and of parts, on four hosts.

python -m experiments.thesis.placement
"""

from __future__ import annotations

import argparse
from typing import List, Optional, Sequence

from experiments.campaign import options
from experiments.campaign.campaign import Campaign, Point, point
from experiments.campaign.placing import PLUGIN
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure
from experiments.drawing.by_placement import (
    COMPARED,
    HOSTS,
    RATIOS,
    SETTING,
    draw,
    summarize,
    table_text,
)
from experiments.models import THESIS_MODELS

_MOST_SLICES = "uniform_split"
"""Measured without a limit, too: a machine that carries it carries the others."""
_ABOUT = {
    "figure": "thesis, figures 5.1 to 5.3: p3kv by placement",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated",
}


def points(chosen: argparse.Namespace, limited: bool) -> List[Point]:
    """A point for each model and placement, at the thesis's M/C, or those without a limit."""
    return [
        point(
            of.model(name), HOSTS, RATIOS[name] if limited else None, chosen.dilation[name],
            ("p3kv",), chosen.iterations,
            **{SETTING: of.placement, "P3KV_PLUGINS": PLUGIN},
        )
        for name in chosen.models
        for of in COMPARED
        if limited or of.placement == _MOST_SLICES
    ]  # fmt: skip


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures all placements in turn, first once without a limit on the links."""
    campaign.measure(points(chosen, limited=False), 1, chosen.retry)
    campaign.measure(points(chosen, limited=True), chosen.repetitions or 1, chosen.retry)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], THESIS_MODELS)
    chosen = options.parse(parser, argv, THESIS_MODELS, THESIS_MODELS[:1])
    measured_figure.make(
        "thesis_placement", _ABOUT, chosen, measure,
        lambda records: summarize(records.runs), table_text,
        lambda records: draw(records.summary, curves.remarks(records.runs, records.links)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
