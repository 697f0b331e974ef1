"""`p3kv plan`: what a job would reach on hosts that one has not got yet."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from p3kv.commands.arguments import positive
from p3kv.commands.quantities import bandwidth, duration
from p3kv.errors import ConfigError

if TYPE_CHECKING:
    from p3kv.commands.arguments import Commands
    from p3kv.forecast import Model
    from p3kv.plan import Series

_COLUMNS = 80

_SHARES = "Each layer computes as long as its share of the operations says."

_DESCRIPTION = """\
Predict how many samples a second a model trains on several hosts, with
dist_sync, with p3kv, and with p3kv first in first out (FIFO), and what no store
can exceed (bound). Nothing is trained: a simulation needs the sizes of the
layers and what you say of a host and its network.

example: p3kv plan --model resnet50_v1 --batch 32 --compute 0.3s \\
                   --hosts 8 --bandwidth 1gbit --plot plan.png"""


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="predict how fast a model trains on several hosts",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="a model of gluon's zoo: resnet50_v1, vgg19"
    )
    parser.add_argument(
        "--batch", required=True, type=positive, metavar="N", help="samples in each host's batch"
    )
    parser.add_argument(
        "--compute",
        required=True,
        type=duration,
        metavar="TIME",
        help="what a batch's forward and backward pass take on one host, such as 300ms",
    )
    parser.add_argument(
        "--hosts",
        required=True,
        type=_several,
        metavar="N",
        help="number of hosts, each with a worker and a server",
    )
    parser.add_argument(
        "--bandwidth",
        required=True,
        type=bandwidth,
        metavar="RATE",
        help="what each host's link carries in each direction, such as 10gbit",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it: plan.png (needs matplotlib)"
    )
    parser.set_defaults(do=_plan, parser=parser)


def _several(text: str) -> int:
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("one host has no network to plan for; write 2 or more")
    return number


def _plan(options: argparse.Namespace) -> int:
    from p3kv import plan

    if options.plot is not None:
        _check_plots()
    model = _model(options.model, options.batch, options.compute)
    series = plan.predict(model.workload, model.batch_size, options.hosts, options.bandwidth)
    print(
        f"{model.name}: {model.elems / 1e6:.3g} million parameters, {model.size_bytes / 1e6:.3g} "
        f"MB; {options.hosts} hosts that never wait: {series.asked.computing_samples_s:.0f} "
        "samples/s\n\nsamples/s of all hosts"
    )
    print("\n".join(plan.table(series)))
    simulated, *more = plan.caveats([*series.by_hosts, *series.by_bandwidth])
    said = [plan.advice(series.asked), f"{simulated} {_SHARES}", *more]
    print("".join(f"\n{fill(text, _COLUMNS)}\n" for text in said), end="")
    if options.plot is not None:
        _draw(series, model.name, options.plot)
    return 0


def _model(name: str, batch_size: int, compute_s: float) -> Model:
    from p3kv.frontends import FRONT_ENDS

    try:
        models = {
            known: make
            for front_end in FRONT_ENDS
            for known, make in front_end.known_models().items()
        }
    except ImportError as error:
        raise ConfigError(f"the sizes of the layers are not known: {error}") from error
    if name in models:
        return models[name](batch_size, compute_s)
    nearest = get_close_matches(name.lower(), models, n=3)
    wish = f"did you mean {' or '.join(nearest)}?" if nearest else f"there are {', '.join(models)}"
    raise ConfigError(f"there is no model '{name}'; {wish}")


def _check_plots() -> None:
    try:
        import p3kv.plan.picture  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot has nothing to draw with: {error}. Install it: pip install 'p3kv[plots]'"
        ) from error


def _draw(series: Series, model: str, path: Path) -> None:
    from p3kv.plan.picture import draw

    try:
        draw(series, model, path)
    except (OSError, ValueError) as error:  # matplotlib's ValueError: no format has this ending
        raise ConfigError(f"can't draw {path}: {error}") from error
    print(f"\n{path}: the same, as curves")
