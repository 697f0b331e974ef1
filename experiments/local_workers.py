"""Several workers on a host: they send each for itself, or one sum of their gradients.

python -m experiments.local_workers
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.measure import measure
from experiments.campaign.records import Records
from experiments.campaign.traffic import Sampler
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_local_workers import (
    DILATION,
    HOSTS,
    Case,
    draw,
    rate_mbit_s,
    summarize,
    table_text,
)
from experiments.models import load

_PER_HOST = (1, 2, 4)
_MEASURED = {
    "p3kv": ("p3kv", {}),
    "p3kv_each": ("p3kv", {"P3KV_LOCAL_AGGREGATION": "0"}),
    "dist_sync": ("dist_sync", {}),
}
"""By name: the system, and settings beside those that it has."""
_ABOUT = {
    "figure": f"iterations on {HOSTS} hosts, each with a server, by how many workers each has",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated; sent_share: bytes "
    "that the first host's link sends in an iteration, by the model's; cpu_s: of all processes, "
    "while workers measure",
}


def cases(models: Sequence[str], quick: bool) -> Iterator[Case]:
    """All that a repetition measures, systems in turn."""
    for model in models[: 1 if quick else None]:
        for per_host in _PER_HOST[: 2 if quick else None]:
            for system in _MEASURED:
                if system != "p3kv_each" or per_host > 1:
                    yield Case(system, model, per_host)


def run(case: Case, iterations: int, warm_up: int) -> Dict[str, Any]:
    """Measures one case on a cluster of its own. Raises RunFailed."""
    system, settings = _MEASURED[case.system]
    with Cluster(HOSTS, rate_mbit_s(case.model)) as cluster:
        traffic = Sampler(lambda: cluster.interface_counters(cluster.hosts[0]))
        measured = measure(
            cluster, system, case.model, DILATION[case.model], warm_up, iterations, 900.0,
            during=traffic, per_host=case.per_host, **settings,
        )  # fmt: skip
    first, *_, last = traffic.samples()
    sent_share = (last.sent - first.sent) / iterations / load(case.model).size_bytes
    return {**turns.facts(measured), "sent_share": round(sent_share, 4)}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.parser(__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=DILATION, default=list(DILATION))
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "local_workers"), _ABOUT)
    turns.measure(records, chosen, [*cases(chosen.models, chosen.quick)], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
