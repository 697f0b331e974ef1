"""PyTorch: efficiency by M/C of p3kv.torch, DistributedDataParallel and FSDP2, beside the bound.

All systems run where M is C. Elsewhere FSDP2, which is far behind, does not run, and DDP runs with
one size of buckets.

python -m experiments.torch_throughput
"""

from __future__ import annotations

import argparse
from typing import List, Optional, Sequence

from matplotlib.figure import Figure

from experiments.campaign import options
from experiments.campaign.campaign import DILATION, Campaign, Point, point
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure
from experiments.drawing.by_ratio import draw, summarize, table_text
from experiments.emulation.systems import IN_TORCH

FIGURE_MODELS = ("resnet50", "gpt2_small")
RATIOS = (1.0, 0.5, 2.0, 4.0)
HOSTS = 4
_DILATION = {**DILATION, "resnet50": 3.0}
"""Two cores carry four hosts with some to spare: each value is copied once more than with MXNet."""
COMPARED_REPETITIONS = 3
"""How often each system runs where M is C, unless told."""
_ELSEWHERE = ("p3kv_torch", "ddp_5mb")
_ABOUT = {
    "figure": "PyTorch: efficiency, C by the time of an iteration, by M/C",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated",
}


def points(chosen: argparse.Namespace, ratios: Sequence[Optional[float]]) -> List[Point]:
    """What is measured at these ratios; None is without a limit."""
    return [
        point(
            model, HOSTS, ratio, chosen.dilation[model],
            [one for one in chosen.systems if ratio == 1 or one in _ELSEWHERE],
            chosen.iterations,
        )
        for ratio in ratios
        for model in chosen.models
    ]  # fmt: skip


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures all points, and those where M is C more often."""
    unlimited = [] if chosen.quick else [None]
    campaign.measure(
        points(chosen, [*chosen.ratios, *unlimited]), chosen.repetitions or 1, chosen.retry
    )
    often = chosen.repetitions or (1 if chosen.quick else COMPARED_REPETITIONS)
    compared = [ratio for ratio in chosen.ratios if ratio == 1]
    campaign.measure(points(chosen, compared), often, chosen.retry)


def _draw(records: Records) -> Figure:
    return draw(records.summary, curves.remarks(records.runs, records.links))


def arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options, with all defaults in but `repetitions`. Ends the program with a sentence where
    PyTorch is not there."""
    parser = options.parser(
        __doc__.splitlines()[0],
        FIGURE_MODELS,
        f"1, where M is C {COMPARED_REPETITIONS}, quick: 1",
        _DILATION,
    )
    parser.add_argument(
        "--ratios", nargs="+", type=float, metavar="M/C",
        help=f"rates, by M/C; default: {' '.join(f'{r:g}' for r in RATIOS)}, quick: 1",
    )  # fmt: skip
    options.add_systems(parser, IN_TORCH)
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    chosen.ratios = chosen.ratios or (RATIOS[:1] if chosen.quick else RATIOS)
    chosen.systems = chosen.systems or (_ELSEWHERE if chosen.quick else IN_TORCH)
    options.check_torch(chosen)
    return chosen


def main(argv: Optional[Sequence[str]] = None) -> None:
    measured_figure.make(
        "torch_throughput",
        _ABOUT,
        arguments(argv),
        measure,
        lambda records: summarize(records.runs),
        table_text,
        _draw,
    )


if __name__ == "__main__":
    main()
