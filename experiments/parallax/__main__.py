"""Parallax's evaluation with p3kv: by hosts, parts, workers of a host, servers, alphas; a training.

python -m experiments.parallax [hosts] [parts] [workers] [servers] [alphas] [words]
"""

from __future__ import annotations

import argparse
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from matplotlib.figure import Figure

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.drawing import curves
from experiments.models.parallax import NAMES, SCALE
from experiments.parallax import pictures, servers, words
from experiments.parallax.cases import Case, available, run, summarize, table_text

_ABOUT = {
    "computation": curves.EMULATED,
    "models": f"Parallax (EuroSys'19), table 1, {SCALE} times smaller, as links are, too "
    "(experiments.models.parallax); rows of tables drawn by Zipf's law, as many different ones in "
    "a batch as alpha says (experiments.emulation.sparse_emulator)",
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each iteration; compute_s: C, dilated; throughput: of all workers, as "
    "it would be without dilation; sent_bytes: what the first host's link sends in an iteration",
}
_LANGUAGE = NAMES[:2]
_ALPHAS = (1.0, 0.5, 0.25, 0.1, 0.04)


class _Made(NamedTuple):
    """A figure of throughputs."""

    about: str
    cases: Callable[[bool], List[Case]]
    draw: Callable[[Sequence[Mapping[str, object]]], Figure]

    def make(self, name: str, chosen: argparse.Namespace) -> None:
        """Measures and draws it."""
        path = options.numbers_path(chosen, f"parallax_{name}")
        records = Records(path, {"figure": self.about, **_ABOUT})
        cases = [one for one in self.cases(chosen.quick) if one.model in chosen.models]
        turns.measure(records, chosen, cases, run)
        records.summary = summarize(records.runs)
        print(table_text(records.summary))
        curves.finish(records, self.draw(records.summary))


def _by_hosts(quick: bool) -> List[Case]:
    ways = available(("p3kv", "dist_sync", "horovod"))
    models, hosts = (NAMES[:1], (1, 2)) if quick else (NAMES, (1, 2, 4, 8))
    return [Case(way, model, count) for model in models for count in hosts for way in ways]


def _by_part(quick: bool) -> List[Case]:
    ways = ["p3kv", "no_sums", "dense", "whole", "fifo"]
    ways += ["base", "base_rows", "base_sums", "base_parts"]
    if quick:
        return [Case(way, "nmt", 2, 2) for way in ways[::2]]
    return [Case(way, model, 4, 2) for model in _LANGUAGE for way in ways]


def _by_workers(quick: bool) -> List[Case]:
    return [
        Case(way, model, 2, per_host)
        for model in _LANGUAGE[: 1 if quick else None]
        for per_host in ((2,) if quick else (1, 2, 4))
        for way in ("no_sums", "p3kv", "dist_sync")
    ]


def _by_alpha(quick: bool) -> List[Case]:
    alphas = _ALPHAS[-2:] if quick else _ALPHAS
    hosts = 2 if quick else 4
    found = [Case(way, "lm", hosts, 1, alpha) for alpha in alphas for way in ("p3kv", "dist_sync")]
    return [*found, Case("dense", "lm", hosts)]


_THROUGHPUT = {
    "hosts": _Made(
        "throughput by hosts: table 4 of the paper, figures 12 and 13 of its earlier form",
        _by_hosts,
        pictures.by_hosts,
    ),
    "parts": _Made(
        "throughput with one part of p3kv after the other, and with one taken away: table 4 of the "
        "paper's earlier form",
        _by_part,
        pictures.by_part,
    ),
    "workers": _Made(
        "throughput by workers of a host, with sums on hosts and without",
        _by_workers,
        pictures.by_workers,
    ),
    "alphas": _Made(
        "throughput against alpha, with the time of computing as it is: table 6 of the paper",
        _by_alpha,
        pictures.by_alpha,
    ),
}


def _servers(name: str, chosen: argparse.Namespace) -> None:
    records = Records(options.numbers_path(chosen, f"parallax_{name}"), servers.ABOUT)
    turns.measure_each(records, chosen, servers.cases(chosen.quick), servers.run)
    records.summary = servers.summarize(records.runs)
    print(servers.table_text(records.summary))
    curves.finish(records, servers.draw(records.summary))


def _words(name: str, chosen: argparse.Namespace) -> None:
    records = Records(options.numbers_path(chosen, f"parallax_{name}"), words.ABOUT)
    turns.measure_each(records, chosen, words.cases(chosen.quick), words.run)
    records.summary = words.summarize(records.runs)
    print(words.table_text(records.summary))
    curves.finish(records, words.draw(records.runs))


FIGURES: Dict[str, Callable[[str, argparse.Namespace], None]] = {
    **{name: made.make for name, made in _THROUGHPUT.items()},
    "servers": _servers,
    "words": _words,
}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.parser(__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument(
        "--models", nargs="+", choices=NAMES, default=NAMES, help="of throughputs; default: all"
    )
    chosen = parser.parse_args(argv)
    wrong = [name for name in chosen.figures if name not in FIGURES]
    if wrong:
        parser.error(f"there is no figure '{wrong[0]}', only {', '.join(FIGURES)}")
    for name in chosen.figures or FIGURES:
        FIGURES[name](name, chosen)


if __name__ == "__main__":
    main()
