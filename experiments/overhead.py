"""What synchronising costs where the network is no limit: time, processor, memory and step().

Four hosts without a limit on their links, each a worker and a server, SGD on the servers; the
systems take turns.

python -m experiments.overhead
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from tqdm import tqdm

from experiments.campaign import machine, options
from experiments.campaign.job import run_job
from experiments.campaign.measure import measure
from experiments.campaign.records import Records
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing.curves import Spread
from experiments.emulation.systems import SYSTEMS
from experiments.models import load

HOSTS = 4
REPETITIONS = 3
PEER = "dist_sync"
COMPARED = (PEER, "p3kv")
STEPS = {"pending_step_s": "while backward goes on", "ready_step_s": "gradients are ready"}
_ABOUT = {
    "what": "synchronising without a limit on the links: all gradients are ready at once, and all "
    "weights are waited for",
    "units": "iteration_s: the slowest worker's, one value for each round; cpu_s: processor time "
    "of all processes in these rounds; worker_rss_kib, server_rss_kib: the most memory that one "
    "held; arrays_rss_kib: a worker's with its arrays and no store; idle_server_rss_kib: a "
    "server's without slices; pending_step_s, ready_step_s: what Trainer.step took of the script's "
    "time on one host while backward went on, and with all gradients ready",
}


class Case(NamedTuple):
    """A model that is synchronised, and in how many measured rounds."""

    model: str
    rounds: int


CASES = (Case("resnet50_at_once", 20), Case("thousand_tensors", 100), Case("vgg19_at_once", 4))


def run_rounds(cluster: Cluster, case: Case, system: str) -> Dict[str, Any]:
    """Measures whole rounds of `system`. Raises RunFailed."""
    result = measure(cluster, system, case.model, iterations=case.rounds)
    return {
        "model": case.model,
        "system": system,
        "hosts": result.hosts,
        "iteration_s": [round(seconds, 6) for seconds in result.iteration_s],
        "cpu_s": round(result.cpu_s, 2),
        "worker_rss_kib": result.worker_rss_kib,
        "arrays_rss_kib": result.arrays_rss_kib,
        "server_rss_kib": result.server_rss_kib,
        "idle_server_rss_kib": _idle_server_rss_kib(),
    }


def run_steps(cluster: Cluster, system: str) -> Dict[str, Any]:
    """Measures what `Trainer.step` takes of a script's time. Raises RunFailed."""
    job = run_job(
        cluster, SYSTEMS[system], ["experiments.emulation.step_worker", system], 300.0, {}
    )
    return {
        "model": "resnet50",
        "system": system,
        "hosts": len(cluster.hosts),
        "parameters": job.ends[0]["parameters"],
        **{name: [round(seconds, 6) for seconds in job.ends[0][name]] for name in STEPS},
    }


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables: rounds and their processor time, memory, `Trainer.step`."""
    rounds = [run for run in runs if "iteration_s" in run]
    lines = [
        "",
        f"{'one round':20}{'':12}{'median':>10}{'spread':>20}{'of peer':>9}{'CPU s/GB':>10}",
    ]
    for case in CASES:
        peer_s = None
        for system in COMPARED:
            of = _select(rounds, case.model, system)
            if not of:
                continue
            seconds = Spread.of([statistics.median(run["iteration_s"]) for run in of])
            if system == PEER:
                peer_s = seconds.median
            share = "-" if peer_s is None else f"{seconds.median / peer_s:.2f}"
            spread = f"{seconds.low * 1e3:.1f} - {seconds.high * 1e3:.1f} ms"
            cpu = statistics.median(_cpu_s_per_gb(run) for run in of)
            lines.append(
                f"{case.model:20}{system:12}{seconds.median * 1e3:>7.1f} ms{spread:>20}{share:>9}"
                f"{cpu:>10.2f}"
            )
    lines += ["", f"{'MiB beyond':20}{'':12}{'worker':>10}{'server':>10}"]
    for case in CASES:
        for system in COMPARED:
            of = _select(rounds, case.model, system)
            if of:
                worker, server = (max(each) for each in zip(*map(_beyond_mib, of)))
                lines.append(f"{case.model:20}{system:12}{worker:>10.0f}{server:>10.0f}")
    lines += [
        "A worker's beyond weights and gradients, a server's beyond its part of weights and sums.",
        "",
        f"{'Trainer.step':24}{'':12}{'median':>10}{'slowest':>10}  us a parameter",
    ]
    for name, title in STEPS.items():
        for system in COMPARED:
            steps = [run for run in runs if name in run and run["system"] == system]
            times_us = [1e6 * s / run["parameters"] for run in steps for s in run[name]]
            if times_us:
                median, slowest = statistics.median(times_us), max(times_us)
                lines.append(f"{title:24}{system:12}{median:>10.1f}{slowest:>10.1f}")
    return "\n".join(lines)


def _select(runs: Sequence[Mapping[str, Any]], model: str, system: str) -> List[Mapping[str, Any]]:
    return [run for run in runs if run["model"] == model and run["system"] == system]


def _cpu_s_per_gb(run: Mapping[str, Any]) -> float:
    """Processor time of all processes for each gigabyte that a worker synchronises."""
    size_bytes = load(run["model"]).size_bytes
    return run["cpu_s"] / (len(run["iteration_s"]) * run["hosts"] * size_bytes / 1e9)


def _beyond_mib(run: Mapping[str, Any]) -> Sequence[float]:
    """What a worker and a server hold beyond what any store must hold there."""
    part_kib = load(run["model"]).size_bytes / run["hosts"] / 1024
    worker_kib = run["worker_rss_kib"] - run["arrays_rss_kib"]
    server_kib = run["server_rss_kib"] - run["idle_server_rss_kib"] - 2 * part_kib
    return worker_kib / 1024, server_kib / 1024


def _idle_server_rss_kib() -> int:
    """What a process holds that has imported what a server imports."""
    code = (
        "import p3kv.server.server, p3kv.frontends.mxnet.server_optimizer\n"
        "status = open('/proc/self/status').read().split()\n"
        "print(status[status.index('VmRSS:') + 1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each once, into a file of its own")
    chosen = parser.parse_args(argv)
    repetitions = 1 if chosen.quick else REPETITIONS
    problem = missing_requirements()
    if problem is not None:
        raise SystemExit(problem)
    path = chosen.output / f"overhead{'-quick' if chosen.quick else ''}.json"
    path.unlink(missing_ok=True)
    records = Records(path, _ABOUT)
    records.begin(machine.describe("cubic"))
    turns = [(case, system) for case in (*CASES, None) for system in COMPARED]
    with Cluster(HOSTS) as cluster, Cluster(1) as one_host, tqdm(
        total=repetitions * len(turns)
    ) as bar:
        for _ in range(repetitions):
            for case, system in turns:
                bar.set_description(f"{case.model if case else 'Trainer.step'}, {system}")
                if case is None:
                    records.add_run(run_steps(one_host, system))
                else:
                    records.add_run(run_rounds(cluster, case, system))
                bar.update()
    print(report(records.runs))
    print(records.path)


if __name__ == "__main__":
    main()
