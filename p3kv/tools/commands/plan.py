"""`p3kv plan`: what a job would reach on hosts that one has not got yet."""

from __future__ import annotations

import argparse
import shlex
import sys
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, List, NamedTuple, Tuple

from p3kv.config import Settings
from p3kv.errors import ConfigError
from p3kv.tools.commands.arguments import bandwidth, complete_with, duration, positive

if TYPE_CHECKING:
    from p3kv.report.forecast import Model, Workload
    from p3kv.tools.plan import Series

_COLUMNS = 80
_STEPS = 20
_FLOAT32_BYTES = 4

_SHARES = "Each layer computes as long as its share of the operations says."
_MEASURED = "Each layer computes as long as it did here, with nothing sent."

HELP = "predict how fast a model trains on several hosts"
USAGE = None
DESCRIPTION = """\
Predict how many samples a second a model trains on several hosts, with
what its framework has (PyTorch's DDP, MXNet's dist_sync), with p3kv, and with
p3kv first in first out (FIFO), and what nothing can exceed (bound). Nothing is
trained: a simulation needs the sizes of the layers and what you say of a host
and its network. With --script, the layers and their times are those of your own
script, of which some steps run here; --model knows MXNet's.

examples: p3kv plan --model resnet50_v1 --batch 32 --compute 0.3s \\
                    --hosts 8 --bandwidth 1gbit --plot plan.png
          p3kv plan --script "python train.py" --batch 32 \\
                    --hosts 8 --bandwidth 1gbit"""


class _Planned(NamedTuple):
    """Model to be trained: its name, its layers, and what is said of their times."""

    name: str
    workload: Workload
    shares: str
    own: str
    """What the framework has itself."""

    @property
    def size_bytes(self) -> int:
        return sum(self.workload.layer_bytes)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    model = what.add_argument(
        "--model", metavar="NAME", help="a model of MXNet's gluon zoo: resnet50_v1, vgg19"
    )
    complete_with(model, _names())
    what.add_argument(
        "--script",
        metavar="COMMAND",
        help="a script that uses p3kv, such as 'python train.py': some of its steps run alone",
    )
    parser.add_argument(
        "--batch", required=True, type=positive, metavar="N", help="samples in each host's batch"
    )
    parser.add_argument(
        "--compute",
        type=duration,
        metavar="TIME",
        help="what a batch's forward and backward pass take on one host, such as 300ms; with "
        "--script it is measured",
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


def _several(text: str) -> int:
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("one host has no network to plan for; write 2 or more")
    return number


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.tools import plan

    if options.plot is not None:
        _check_plots()
    model = _planned(options)
    series = plan.predict(
        model.workload, options.batch, options.hosts, options.bandwidth, model.own
    )
    print(
        f"{model.name}: {model.size_bytes / _FLOAT32_BYTES / 1e6:.3g} million parameters, "
        f"{model.size_bytes / 1e6:.3g} "
        f"MB; {options.hosts} hosts that never wait: {series.asked.computing_samples_s:.0f} "
        "samples/s\n\nsamples/s of all hosts"
    )
    print("\n".join(plan.table(series)))
    simulated, *more = plan.caveats([*series.by_hosts, *series.by_bandwidth])
    said = [plan.advice(series.asked), f"{simulated} {model.shares}", *more]
    print("".join(f"\n{fill(text, _COLUMNS)}\n" for text in said), end="")
    if options.plot is not None:
        _draw(series, model.name, options.plot)
    return 0


def _planned(options: argparse.Namespace) -> _Planned:
    from p3kv.report.forecast import DIST_SYNC, FRAMEWORKS_OWN

    if options.script is None:
        if options.compute is None:
            options.parser.error("--model needs --compute, the time of a batch on one host")
        model = _model(options.model, options.batch, options.compute)
        return _Planned(model.name, model.workload, _SHARES, DIST_SYNC)
    if options.compute is not None:
        options.parser.error("--script measures what --compute would say: leave one out")
    workload, own = _computation(options.script)
    known = own if own in FRAMEWORKS_OWN else DIST_SYNC
    return _Planned(options.script, workload, _MEASURED, known)


def _computation(script: str) -> Tuple[Workload, str]:
    from p3kv.tools import trials

    try:
        command = shlex.split(script)
    except ValueError as error:
        raise ConfigError(f"--script {script}: {error}") from error
    show = sys.stderr.buffer if Settings.from_environment().verbose else None
    print(f"p3kv plan: some {_STEPS} steps of '{script}' run first", file=sys.stderr, flush=True)
    try:
        return trials.computation(command, _STEPS, show)
    except trials.TrialFailed as failure:
        raise ConfigError("\n".join([*failure.last_lines, str(failure)])) from None


def _names() -> List[str]:
    from p3kv.frontends import FRONT_ENDS

    return [name for front_end in FRONT_ENDS for name in front_end.model_names]


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
        import p3kv.tools.pictures  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot has nothing to draw with: {error}. Install it: pip install 'p3kv[plots]'"
        ) from error


def _draw(series: Series, model: str, path: Path) -> None:
    from p3kv.tools.pictures import draw_predictions

    try:
        draw_predictions(series, model, path)
    except (OSError, ValueError) as error:  # matplotlib's ValueError: no format has this ending
        raise ConfigError(f"can't draw {path}: {error}") from error
    print(f"\n{path}: the same, as curves")
