"""What P3KV_TRACE costs: processor time for each record, with and without a trace in turns.

Two hosts without a limit on their links, each a worker and a server, and many small keys.

python -m experiments.tracing
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.measure import measure
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing.curves import Spread

HOSTS = 2
MODEL = "thousand_tensors"
_ABOUT = {
    "what": f"p3kv with and without P3KV_TRACE, synchronising {MODEL}",
    "units": "cpu_s: processor time of all processes in an iteration; records: how many all "
    "processes wrote in an iteration",
}


class Case(NamedTuple):
    """Whether the job is traced."""

    traced: bool


def run(case: Case, iterations: int, warm_up: int) -> Dict[str, Any]:
    """Measures one case on a cluster of its own. Raises RunFailed."""
    with Cluster(HOSTS) as cluster, tempfile.TemporaryDirectory() as folder:
        settings = {"P3KV_TRACE": folder} if case.traced else {}
        done = measure(cluster, "p3kv", MODEL, warm_up=warm_up, iterations=iterations, **settings)
        records = sum(len(path.read_bytes().splitlines()) for path in Path(folder).iterdir())
    return {
        "hosts": HOSTS,
        "iterations": iterations,
        "cpu_s": round(done.cpu_s / iterations, 5),
        "records": round(records / (warm_up + iterations)),
    }


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Processor time of iterations, and what a record takes of it: median and spread."""
    plain, traced = (_of(runs, with_trace) for with_trace in (False, True))
    if not plain or not traced:
        return "not measured yet"
    records = traced[0]["records"]
    cpu = [Spread.of([one["cpu_s"] for one in of]) for of in (plain, traced)]
    record_us = Spread.of(
        [(b["cpu_s"] - a["cpu_s"]) / b["records"] * 1e6 for a, b in zip(plain, traced)]
    )
    return (
        f"an iteration takes {cpu[0].median:.3f} s ({cpu[0].low:.3f} to {cpu[0].high:.3f}) of "
        f"processor time, and {cpu[1].median:.3f} s ({cpu[1].low:.3f} to {cpu[1].high:.3f}) with "
        f"{records} records: {record_us.median:.1f} us each "
        f"({record_us.low:.1f} to {record_us.high:.1f})"
    )


def _of(runs: Sequence[Mapping[str, Any]], traced: bool) -> List[Mapping[str, Any]]:
    return [one for one in runs if one["traced"] == traced]


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.parser(__doc__.splitlines()[0])
    parser.set_defaults(iterations=30)
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "tracing"), _ABOUT)
    turns.measure(records, chosen, [Case(False), Case(True)], run)
    print(report(records.runs))
    print(records.path)


if __name__ == "__main__":
    main()
