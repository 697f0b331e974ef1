"""Links that idle: servers on hosts without a worker, and a host with a slower link.

Each server should keep what its host's link has time for (`p3kv.slicing.placement`). Bounds are
those of a linear programme, by a library.

python -m experiments.idle_links
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.measure import measure
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_spare_hosts import (
    DILATION,
    SLOW_SHARE,
    WORKERS,
    Case,
    draw,
    rate_mbit_s,
    summarize,
    table_text,
)

_ALONE = (0, 1, 2, 4)
_MEASURED = {
    "p3kv": ("p3kv", {}),
    "p3kv_balanced": ("p3kv", {"P3KV_PLACEMENT": "balanced"}),
    "dist_sync": ("dist_sync", {}),
}
"""By name: the system, and settings beside those that it has."""
_ABOUT = {
    "figure": f"iterations of {WORKERS} workers, each on a host with a server, by how many more "
    "hosts have a server only, and with one host whose link has half the rate",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated; bound_s: no placement "
    "and no schedule is faster",
}


def cases(models: Sequence[str], quick: bool) -> Iterator[Case]:
    """All that a repetition measures, systems in turn."""
    for model in models[: 1 if quick else None]:
        for alone, slow in (*((alone, False) for alone in _ALONE[:: 3 if quick else 1]), (0, True)):
            for system in _MEASURED:
                if system != "p3kv_balanced" or alone or slow:
                    yield Case(system, model, alone, slow)


def run(case: Case, iterations: int, warm_up: int) -> Dict[str, Any]:
    """Measures one case on a cluster of its own. Raises RunFailed."""
    system, settings = _MEASURED[case.system]
    rate = rate_mbit_s(case.model)
    with Cluster(WORKERS + case.alone, rate) as cluster:
        if case.slow:
            cluster.set_rate(rate * SLOW_SHARE, cluster.hosts[-1])
        measured = measure(
            cluster, system, case.model, DILATION[case.model], warm_up, iterations, 600.0,
            workers=WORKERS, **settings,
        )  # fmt: skip
    return turns.facts(measured)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.parser(__doc__.splitlines()[0])
    parser.set_defaults(warm_up=6)  # p3kv follows how long five steps have waited
    parser.add_argument("--models", nargs="+", choices=DILATION, default=list(DILATION))
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "idle_links"), _ABOUT)
    turns.measure(records, chosen, [*cases(chosen.models, chosen.quick)], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
