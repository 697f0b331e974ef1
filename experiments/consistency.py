"""Consistency rules: how much of full speed each has where exact synchrony costs much.

Sockeye, whose first layer is ready last and needed first, where M is C; ResNet-50 with stragglers;
ResNet-50 on links by which an exchange takes 40 times as long as computing.

python -m experiments.consistency
"""

from __future__ import annotations

import argparse
from typing import List, Optional, Sequence

from experiments.campaign import options
from experiments.campaign.campaign import Campaign, Point, point
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure
from experiments.drawing.by_consistency import CASES, Case, draw, summarize, table_text

_ABOUT = {
    "figure": "C by the mean time of an iteration, by consistency rule",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; total_s: the time in which the slowest "
    "worker has made all of them; compute_s: C of a step that is not slow, dilated",
}
_QUICK_ITERATIONS = 10


def points(case: Case, chosen: argparse.Namespace) -> List[Point]:
    """A point for each system of a case: some need more iterations than others."""
    made = []
    for system, iterations in case.iterations.items():
        if chosen.quick:
            iterations = min(iterations, _QUICK_ITERATIONS)
        at = point(case.model, case.hosts, case.ratio, case.dilation, [system], iterations)
        made.append(at._replace(iterations=iterations))
    return made


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures the cases that are asked for, systems in turn."""
    cases = [CASES[name] for name in chosen.cases]
    every = [at for case in cases for at in points(case, chosen)]
    campaign.measure(every, chosen.repetitions or 1, chosen.retry)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], ())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    chosen = options.parse(parser, argv, ())
    measured_figure.make(
        "consistency", _ABOUT, chosen, measure,
        lambda records: summarize(records.runs), table_text,
        lambda records: draw(records.summary, curves.remarks(records.runs, records.links)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
