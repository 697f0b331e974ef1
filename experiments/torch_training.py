"""PyTorch: a small GPT trains on Python's library, on two throttled hosts. Nothing is emulated.

One process that reads both workers' batches shows what the losses must be. p3kv.torch and
DistributedDataParallel take turns.

python -m experiments.torch_training
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_loss import ALONE, draw, summarize, table_text
from experiments.emulation.systems import SYSTEMS

HOSTS = 2
RATE_MBIT_S = 300.0
STEPS = 150
_QUICK_STEPS = 30
_MEASURED = ("p3kv_torch", "ddp_25mb", "ddp_5mb", "ddp_1mb")
_TIMEOUT_S = 900.0
_ABOUT = {
    "figure": f"loss of a small GPT by step and by time, {HOSTS} hosts, AdamW",
    "computation": "real, with one thread in each worker",
    "units": f"losses: means of all workers, in nats; ends_s: when the slowest worker ended each "
    f"step; links carry {RATE_MBIT_S:g} Mbit/s in each direction",
}


class Case(NamedTuple):
    """A system of `experiments.emulation.systems`, or one process, and how many steps."""

    system: str
    steps: int


def run(case: Case) -> Dict[str, Any]:
    """Trains once, on hosts of its own. Raises RunFailed."""
    alone = case.system == ALONE
    system = SYSTEMS["ddp_25mb" if alone else case.system]
    name = next(name for name, one in SYSTEMS.items() if one is system)
    worker = ["experiments.training.torch_worker", name, str(HOSTS), str(case.steps)]
    worker += [f"--joined={HOSTS}"] * alone
    with Cluster(1 if alone else HOSTS, RATE_MBIT_S) as cluster:
        job = run_job(cluster, system, worker, _TIMEOUT_S, {})
    ends = job.ends
    return {
        "elems": ends[0]["elems"],
        "losses": [statistics.mean(of) for of in zip(*(end["losses"] for end in ends))],
        "ends_s": [round(max(of), 4) for of in zip(*(end["ends_s"] for end in ends))],
    }


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    chosen = parser.parse_args(argv)
    options.check_torch(chosen)
    records = Records(options.numbers_path(chosen, "torch_training"), _ABOUT)
    steps = _QUICK_STEPS if chosen.quick else STEPS
    systems = _MEASURED[:2] if chosen.quick else _MEASURED
    repetitions = 1 if chosen.quick else chosen.repetitions
    cases = [Case(ALONE, steps), *(Case(one, steps) for one in systems * repetitions)]
    turns.measure_each(records, chosen, cases, run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.runs))


if __name__ == "__main__":
    main()
