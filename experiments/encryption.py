"""What P3KV_ENCRYPT=1 costs: processor time where links have no limit, time where they have one.

Two hosts, each a worker and a server; with and without encryption in turns.

python -m experiments.encryption
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from tqdm import tqdm

from experiments.campaign import machine, options
from experiments.campaign.measure import measure
from experiments.campaign.records import Records
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing.curves import Spread
from experiments.models import load

HOSTS = 2
_ABOUT = {
    "what": "p3kv with and without P3KV_ENCRYPT=1, SGD on the servers",
    "units": "rate_mbit_s: each link, each direction, none: no limit; iteration_s: the slowest "
    "worker's, one value for each iteration; cpu_s: processor time of all processes in these",
}


class Case(NamedTuple):
    """A model that is trained."""

    model: str
    rate_mbit_s: Optional[float]
    dilation: float
    iterations: int


CASES = (
    Case("resnet50_at_once", None, 1.0, 20),
    Case("resnet50", 100.0, 7.0, 3),  # M/C = 1
    Case("resnet50_at_once", 50.0, 1.0, 1),  # no computation
)


def run(cluster: Cluster, case: Case, encrypt: int) -> Dict[str, Any]:
    """Measures one case. Raises RunFailed."""
    cluster.set_rate(case.rate_mbit_s)
    done = measure(
        cluster, "p3kv", case.model, case.dilation, warm_up=1, iterations=case.iterations,
        P3KV_ENCRYPT=encrypt,
    )  # fmt: skip
    return {
        **case._asdict(),
        "encrypt": encrypt,
        "hosts": done.hosts,
        "iteration_s": [round(seconds, 5) for seconds in done.iteration_s],
        "cpu_s": round(done.cpu_s, 2),
    }


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case, without and with encryption: medians, and spreads of all runs."""
    lines = [f"{'':18}{'Mbit/s':>8}{'encrypt':>9}{'iteration':>12}{'spread':>18}{'CPU s/GiB':>11}"]
    for case in CASES:
        for encrypt in (0, 1):
            of = [
                one
                for one in runs
                if one["encrypt"] == encrypt and all(one[k] == v for k, v in case._asdict().items())
            ]
            if of:
                seconds = Spread.of([statistics.median(one["iteration_s"]) for one in of])
                cpu = Spread.of([_cpu_s_per_gib(one) for one in of])
                lines.append(
                    f"{case.model:18}{case.rate_mbit_s or 'none':>8}{encrypt:>9}"
                    f"{seconds.median:>10.3f} s{seconds.low:>8.3f} - {seconds.high:>5.3f} s"
                    f"{cpu.median:>7.2f} ({cpu.low:.2f} - {cpu.high:.2f})"
                )
    return "\n".join(lines)


def _cpu_s_per_gib(one: Mapping[str, Any]) -> float:
    """Processor time of all processes, for each GiB that one process sends to another."""
    sent_bytes = 2 * load(one["model"]).size_bytes * one["hosts"] * len(one["iteration_s"])
    return float(one["cpu_s"] / (sent_bytes / 2**30))


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each once, into a file of its own")
    chosen = parser.parse_args(argv)
    problem = missing_requirements()
    if problem is not None:
        raise SystemExit(problem)
    path = options.numbers_path(chosen, "encryption")
    path.unlink(missing_ok=True)
    records = Records(path, _ABOUT)
    place = records.begin(machine.describe("cubic"))
    turns: List[Any] = [(case, encrypt) for case in CASES for encrypt in (0, 1)]
    turns *= 1 if chosen.quick else 3
    with Cluster(HOSTS) as cluster, tqdm(turns) as bar:
        for case, encrypt in bar:
            bar.set_description(f"{case.model}, {case.rate_mbit_s or 'no'} limit, {encrypt}")
            records.add_run({**run(cluster, case, encrypt), "machine": place})
    print(report(records.runs))
    print(records.path)


if __name__ == "__main__":
    main()
