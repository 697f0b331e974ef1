"""The command line that the figures share, and what more the measured ones do."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence, Tuple

from experiments.campaign.campaign import DILATION, Campaign
from experiments.campaign.records import Records
from experiments.cluster import missing_requirements
from experiments.emulation.systems import SYSTEMS

_RESULTS = Path(__file__).parent.parent / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser with what every experiment takes: `--output`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output",
        type=Path,
        default=_RESULTS,
        metavar="DIR",
        help="folder for the numbers (JSON) and the figure (PNG); default: %(default)s",
    )
    return parser


def parser(
    description: str,
    models: Sequence[str],
    repetitions: str = "1",
    dilation: Mapping[str, float] = DILATION,
) -> argparse.ArgumentParser:
    """Returns a parser with what every measured figure takes.

    `models` are those of the figure; `repetitions` and `dilation`, by model, are what it does
    unless told.
    """
    made = arguments(description)
    made.add_argument(
        "--quick", action="store_true", help="a few minutes, into files of their own name"
    )
    made.add_argument(
        "--models", nargs="+", choices=DILATION, metavar="MODEL",
        help=f"of {', '.join(DILATION)}; default: {' '.join(models)}",
    )  # fmt: skip
    made.add_argument(
        "--repetitions", type=_count, metavar="N", help=f"of each run; default: {repetitions}"
    )  # fmt: skip
    made.add_argument(
        "--iterations", type=_count, default=3, metavar="N",
        help="measured in each run; default: %(default)s",
    )  # fmt: skip
    made.add_argument(
        "--warm-up", type=_count, default=2, metavar="N",
        help="iterations before these; default: %(default)s",
    )  # fmt: skip
    made.add_argument(
        "--dilation", nargs="+", type=_dilation, action=_ByModel, default=dilation,
        metavar="[MODEL=]D",
        help="stretch computation on four hosts, and divide bandwidths, by D; default: "
        + " ".join(f"{name}={dilation[name]:g}" for name in models),
    )  # fmt: skip
    made.add_argument("--congestion-control", default="cubic", metavar="NAME")
    made.add_argument("--retry", action="store_true", help="measure again what has failed")
    made.add_argument("--draw", action="store_true", help="measure nothing, draw what is there")
    return made


def add_systems(made: argparse.ArgumentParser, systems: Sequence[str]) -> None:
    """Adds `--systems`; `systems` are those of the figure."""
    made.add_argument(
        "--systems", nargs="+", type=_system, metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)}; default: {' '.join(systems)}; build "
        "horovod with ./scripts/horovod first",
    )  # fmt: skip


def parse(
    made: argparse.ArgumentParser,
    argv: Optional[Sequence[str]],
    models: Sequence[str],
    quick_models: Sequence[str] = ("resnet50",),
) -> argparse.Namespace:
    """Returns the options with all defaults in but `repetitions`; `dilation` is by model."""
    options = made.parse_args(argv)
    options.models = options.models or list(quick_models if options.quick else models)
    return options


def numbers_path(options: argparse.Namespace, figure: str) -> Path:
    """Where a figure's numbers are kept; what `--quick` measures stays apart from full runs."""
    return Path(options.output) / f"{figure}{'-quick' if options.quick else ''}.json"


@contextlib.contextmanager
def measuring(
    records: Records, options: argparse.Namespace, traffic: bool = False
) -> Iterator[Campaign]:
    """Gives a campaign into `records`; `traffic` is the campaign's.

    Ends the program with a sentence where there can be none, and on Ctrl-C: all runs but the
    current one are kept.
    """
    problem = missing_requirements()
    if problem is not None:
        raise SystemExit(f"{os.path.basename(sys.argv[0])}: {problem}")
    try:
        with Campaign(records, options.congestion_control, options.warm_up, traffic) as campaign:
            yield campaign
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on from here") from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _system(text: str) -> str:
    if text not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SYSTEMS)}")
    missing = SYSTEMS[text].missing
    if missing is not None:
        raise argparse.ArgumentTypeError(missing)
    return text


class _ByModel(argparse.Action):
    """Puts what is given by model, or for all of them, over the default."""

    def __call__(
        self, made: Any, options: argparse.Namespace, values: Any, option: Optional[str] = None
    ) -> None:
        given = dict(values)
        for_all = given.get("")
        by_model = {name: given.get(name, for_all or usual) for name, usual in self.default.items()}
        setattr(options, self.dest, by_model)


def _dilation(text: str) -> Tuple[str, float]:
    """A model's name, or none for all, and a number."""
    name, _, number = text.rpartition("=")
    if name not in ("", *DILATION):
        raise argparse.ArgumentTypeError(f"there is no model {name!r}")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{number!r} is not a positive number")
    return name, value


def check_torch(chosen: argparse.Namespace) -> None:
    """Ends the program with a sentence where PyTorch is not there; not with --draw."""
    missing = SYSTEMS["p3kv_torch"].missing
    if missing is not None and not chosen.draw:
        raise SystemExit(missing)
