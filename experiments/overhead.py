"""What synchronising costs: time, processor, memory and step().

Four hosts, each a worker and a server, SGD on the servers; the systems take turns. Where links have
no limit, all gradients are ready at once. Where they have one, workers compute as in figure 7.

python -m experiments.overhead
"""

from __future__ import annotations

from typing import Optional, Sequence, Union

from tqdm import tqdm

from experiments.campaign import machine, options
from experiments.campaign.records import Records
from experiments.campaign.synchronising import Case, run_limited, run_rounds, run_steps
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing.overhead_tables import PEER, report

HOSTS = 4
REPETITIONS = 3
COMPARED = (PEER, "p3kv")
CASES = (Case("resnet50_at_once", 20), Case("thousand_tensors", 100), Case("vgg19_at_once", 4))
RATIOS = (1.0, 2.0, 4.0)
"""M/C of the cases with a limit on the links."""
_ABOUT = {
    "what": "synchronising without a limit on the links: all gradients are ready at once, and all "
    "weights are waited for; with a limit, where M/C is stated: computation is emulated with timed "
    "engine operations, whose processor time is part of cpu_s",
    "units": "iteration_s: the slowest worker's, one value for each round; cpu_s: processor time "
    "of all processes in these rounds; worker_rss_kib, server_rss_kib: the most memory that one "
    "held; arrays_rss_kib: a worker's with its arrays and no store; idle_server_rss_kib: a "
    "server's without slices; pending_step_s, ready_step_s: what Trainer.step took of the script's "
    "time on one host while backward went on, and with all gradients ready",
}


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
    turns = [(case, system) for case in (*CASES, *RATIOS, None) for system in COMPARED]
    with Cluster(HOSTS) as cluster, Cluster(1) as one_host, tqdm(
        total=repetitions * len(turns)
    ) as bar:
        for _ in range(repetitions):
            for case, system in turns:
                bar.set_description(f"{_title(case)}, {system}")
                if case is None:
                    records.add_run(run_steps(one_host, system))
                elif isinstance(case, float):
                    records.add_run(run_limited(HOSTS, case, system))
                else:
                    records.add_run(run_rounds(cluster, case, system))
                bar.update()
    print(report(records.runs))
    print(records.path)


def _title(case: Union[Case, float, None]) -> str:
    if case is None:
        return "Trainer.step"
    return f"M/C = {case:g}" if isinstance(case, float) else case.model


if __name__ == "__main__":
    main()
