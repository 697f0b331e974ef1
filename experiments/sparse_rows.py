"""Sparse rows: a table of which each iteration touches some rows, against dense gradients.

Shaped after Parallax (EuroSys'19), table 6: throughput against the share of touched rows. A
large table is measured at several rates: where links are fast, processors are the limit.

python -m experiments.sparse_rows
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

from experiments.campaign import options, turns
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_share import draw, summarize, table_text
from experiments.emulation.systems import SYSTEMS

HOSTS = 4
RATE_MBIT_S = 25.0
"""So low because few cores serve all hosts, and the network is what is to be measured."""
SLICE_ELEMS = {RATE_MBIT_S: 12_500, 100.0: 12_500, 1000.0: 50_000}
"""What p3kv chooses at these rates. It is set because links have no limit until the table is there,
which would take minutes. Without a limit p3kv measures."""
FASTER: Tuple[Optional[float], ...] = (100.0, 1000.0, None)
"""Rates at which the large table is measured, too; None: without a limit."""
COLUMNS, NARROW = 512, 16
LARGE_ROWS, LARGE_SHARE = 400_000, 0.01
SWEPT_ROWS, SHARES = 5_000, (1.0, 0.5, 0.25, 0.1, 0.04)
_ABOUT = {
    "figure": "iterations a second against the share of rows that each worker touches, and a table "
    f"of {LARGE_ROWS} x {COLUMNS} of which {LARGE_SHARE:.0%} is touched",
    "computation": "none: an iteration pushes the rows of a batch, pulls those of the next one "
    "and waits for them; SGD on the servers. Dense: pushes the whole gradient, pulls the weight",
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; null: no limit; "
    "cpu_s: of all processes, an iteration; iteration_s: the slowest "
    "worker's, one value for each iteration; link_bytes: most that a host's link has carried in a "
    "direction in an iteration; sent_share, received_share: bytes as p3kv counts them, by those of "
    "the worker's rows with numbers of 4 bytes",
}


class Case(NamedTuple):
    """A system, a way to use it, and a table."""

    system: str
    way: str
    rows: int
    share: float
    rate_mbit_s: Optional[float] = RATE_MBIT_S
    columns: int = COLUMNS


def cases(quick: bool) -> Iterator[Case]:
    """All that a repetition measures, systems in turn."""
    for system in ("dist_sync", "p3kv"):
        yield Case(system, "rows", LARGE_ROWS // (10 if quick else 1), LARGE_SHARE)
    for rate in FASTER[:: 2 if quick else 1]:
        for system in ("dist_sync", "p3kv"):
            yield Case(system, "rows", LARGE_ROWS // (10 if quick else 1), LARGE_SHARE, rate)
    swept = [(SWEPT_ROWS, share, COLUMNS) for share in (SHARES[0], SHARES[-1])]
    for rows, share, columns in [(LARGE_ROWS, LARGE_SHARE, NARROW), *swept]:
        for system in ("dist_sync", "p3kv"):
            yield Case(system, "rows", rows, share, None, columns)
    for share in SHARES[:: 4 if quick else 1]:
        for system in ("dist_sync", "p3kv"):
            yield Case(system, "rows", SWEPT_ROWS, share)
    for system in ("dist_sync", "p3kv"):
        yield Case(system, "dense", SWEPT_ROWS, 1.0)


def run(case: Case, iterations: int, warm_up: int) -> Dict[str, Any]:
    """Measures one case on a cluster of its own. Raises RunFailed."""
    touched = round(case.rows * case.share)
    arguments = [case.system, case.way, case.rows, case.columns, touched]
    arguments += [f"--iterations={iterations}", f"--warm-up={warm_up}"]
    module = ["experiments.emulation.rows_worker", *map(str, arguments)]
    rate = case.rate_mbit_s
    settings = {} if rate is None else {"P3KV_SLICE_SIZE": SLICE_ELEMS[rate]}
    with Cluster(HOSTS) as cluster:
        limited = _limited(cluster, rate)
        job = run_job(cluster, SYSTEMS[case.system], module, 300.0, settings, limited)
    counts = [end["counts"] for end in job.ends]
    most = max(max(one["link_sent"], one["link_received"]) for one in counts)
    record = {
        "hosts": HOSTS,
        "iteration_s": [
            round(max(times), 5) for times in zip(*(end["iteration_s"] for end in job.ends))
        ],
        "link_bytes": most // iterations,
        "cpu_s": round(job.cpu_s / iterations, 4),
    }
    if case.way == "rows" and "sent" in counts[0]:
        of_rows = iterations * touched * 4 * (case.columns + 1)
        for name in ("sent", "received"):
            record[f"{name}_share"] = round(max(one[name] for one in counts) / of_rows, 4)
    return record


@contextlib.contextmanager
def _limited(cluster: Cluster, rate_mbit_s: Optional[float]) -> Iterator[None]:
    cluster.set_rate(rate_mbit_s)
    try:
        yield
    finally:
        cluster.set_rate(None)


def main(argv: Optional[Sequence[str]] = None) -> None:
    chosen = turns.parser(__doc__.splitlines()[0]).parse_args(argv)
    records = Records(options.numbers_path(chosen, "sparse_rows"), _ABOUT)
    turns.measure(records, chosen, [*cases(chosen.quick)], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
