"""Codecs: efficiency by M/C beside exact stores, processor time, and from where on each pays.

Gradients are normally distributed, differ from worker to worker, and stay the same: a residual
grows, and other elements are the largest in each iteration.

python -m experiments.codecs
"""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Optional, Sequence

from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.campaign import options
from experiments.campaign.campaign import Campaign, Point, point
from experiments.campaign.codec_cost import cost
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure
from experiments.drawing.by_codec import CODECS, COMPARED, EXACT, draw, summarize, table_text
from experiments.emulation.systems import SYSTEMS

FIGURE_MODELS = ("resnet50", "vgg19")
RATIOS = (4.0, 1.0, 2.0)
HOSTS = 4
_QUICK_RATIOS = (4.0,)
_UNLIMITED = (EXACT, "p3kv_topk")
_ABOUT = {
    "figure": "efficiency, C by the time of an iteration, and processor time by codec",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated; cpu_s: processor time "
    "of all processes in these iterations; alone: processor seconds of codecs for each gigabyte of "
    "gradients, on one core",
}


def points(chosen: argparse.Namespace) -> List[Point]:
    """All that is measured; without a limit comes first."""
    return [
        point(
            model, HOSTS, ratio, chosen.dilation[model],
            [one for one in chosen.systems if ratio is not None or one in _UNLIMITED],
            chosen.iterations,
        )
        for ratio in (None, *chosen.ratios)
        for model in chosen.models
    ]  # fmt: skip


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures codecs alone, unless that is known, and then all points."""
    alone = _known(records)
    for system in tqdm([one for one in (EXACT, *CODECS) if one not in alone], "alone"):
        alone[system] = _alone(system)
    records.summary = {"alone": alone}
    campaign.measure(points(chosen), chosen.repetitions or 1, chosen.retry)


def _alone(system: str) -> Dict[str, float]:
    of = SYSTEMS[system]
    chosen = [of.environment.get(f"P3KV_{way}_CODEC", "identity") for way in ("GRADIENT", "VALUE")]
    return cost(*chosen, of.momentum)._asdict()


def _summarize(records: Records) -> Dict[str, Any]:
    return summarize(records.runs, _known(records))


def _known(records: Records) -> Dict[str, Any]:
    return dict((records.summary or {}).get("alone", {}))


def _draw(records: Records) -> Figure:
    return draw(records.summary, curves.remarks(records.runs, records.links))


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], FIGURE_MODELS)
    parser.add_argument(
        "--ratios", nargs="+", type=float, metavar="M/C",
        help=f"rates, by M/C; default: {' '.join(f'{r:g}' for r in RATIOS)}, quick: 4",
    )  # fmt: skip
    options.add_systems(parser, COMPARED)
    parser.set_defaults(warm_up=3)  # a worker's first value travels as it is
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    chosen.ratios = chosen.ratios or (_QUICK_RATIOS if chosen.quick else RATIOS)
    chosen.systems = chosen.systems or COMPARED
    measured_figure.make("codecs", _ABOUT, chosen, measure, _summarize, table_text, _draw)


if __name__ == "__main__":
    main()
