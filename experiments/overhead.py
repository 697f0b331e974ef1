"""What synchronising costs: time, processor, memory, latency and step().

Four hosts, each a worker and a server, SGD on the servers; the systems take turns. Where links have
no limit, all gradients are ready at once. Where they have one, workers compute as in figure 7.
Small keys are on one host and on two; a large one, and transformers in PyTorch, are on one.

python -m experiments.overhead
"""

from __future__ import annotations

from typing import Optional, Sequence

from tqdm import tqdm

from experiments.campaign import machine, options
from experiments.campaign.records import Records
from experiments.campaign.synchronising import Blocks, Limited, Loopback, Rounds, Small, Step
from experiments.cluster import missing_requirements
from experiments.drawing.overhead_tables import report
from experiments.emulation.systems import SYSTEMS

REPETITIONS = 3
CASES = {
    "rounds": (Rounds("resnet50_at_once", 20), Rounds("thousand_tensors", 100),
               Rounds("vgg19_at_once", 4)),
    "limited": (Limited(1.0), Limited(2.0), Limited(4.0)),
    "small": (Small(1, 1, 1, 2000), Small(2, 8, 10_000, 500)),
    "step": (Step(),),
    "loopback": (Loopback(),),
    "blocks": (Blocks(12, 64, 200), Blocks(4, 112, 200), Blocks(1, 224, 200)),
}  # fmt: skip
_ABOUT = {
    "what": "synchronising without a limit on the links: all gradients are ready at once, and all "
    "weights are waited for; with a limit, where M/C is stated: computation is emulated with timed "
    "engine operations, whose processor time is part of cpu_s",
    "units": "iteration_s: the slowest worker's, one value for each round; cpu_s: processor time "
    "of all processes in these rounds; worker_rss_kib, server_rss_kib: the most memory that one "
    "held; arrays_rss_kib: a worker's with its arrays and no store; idle_server_rss_kib: a "
    "server's without slices; round_trip_s: the slowest worker's, from the first push of small "
    "keys until all new weights are there; trip_s: the same of a large key on one host; step_s: a "
    "step of the slower of two ranks on one host, with all its computation; pending_step_s, "
    "ready_step_s: what Trainer.step took of the script's time on one host while backward went on, "
    "and with all gradients ready",
}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each once, into a file of its own")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE",
                        help=f"of {', '.join(CASES)}; default: all")  # fmt: skip
    chosen = parser.parse_args(argv)
    repetitions = 1 if chosen.quick else REPETITIONS
    cases = [case for kind in chosen.cases for case in CASES[kind]]
    problems = (SYSTEMS[system].missing for case in cases for system in case.systems)
    problem = missing_requirements() or next(filter(None, problems), None)
    if problem is not None:
        raise SystemExit(problem)
    path = chosen.output / f"overhead{'-quick' if chosen.quick else ''}.json"
    path.unlink(missing_ok=True)
    records = Records(path, _ABOUT)
    records.begin(machine.describe("cubic"))
    turns = [(case, system) for case in cases for system in case.systems]
    with tqdm(total=repetitions * len(turns)) as bar:
        for _ in range(repetitions):
            for case, system in turns:
                bar.set_description(f"{case.title}, {system}")
                records.add_run(case.run(system))
                bar.update()
    print(report(records.runs))
    print(records.path)


if __name__ == "__main__":
    main()
