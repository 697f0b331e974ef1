"""PyTorch: how long a step of a real script takes on a slow network, by what its loop does.

A small GPT trains on Python's library on two throttled hosts; nothing is emulated. The loop is
plain, adds up gradients of several backward passes, or does in each step what waits for new weights
or for all gradients. p3kv.torch and DistributedDataParallel take turns.

python -m experiments.torch_loops
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing.curves import Spread
from experiments.emulation.systems import SYSTEMS

HOSTS = 2
RATE_MBIT_S = 100.0
STEPS = 30
_WARM_UP = 3
_TIMEOUT_S = 900.0
LOOPS = {
    "plain": "one backward pass",
    "passes": "4 backward passes, no_sync",
    "clip": "clips by the norm",
    "read_norm": "clips, reads the norm after step",
    "skip": "skips a step that is bad on any worker",
    "scale": "clips, scales the loss by GradScaler",
    "read_weights": "reads each weight's norm after step",
    "average": "averages the weights after step",
}
_PASSES = 4
_BUCKETS = ("ddp_1mb", "ddp_5mb", "ddp_25mb")
_ABOUT = {
    "what": f"seconds of a small GPT's step, {HOSTS} hosts, AdamW, by what the script's loop does",
    "computation": "real, with one thread in each worker",
    "units": f"step_s: median of {STEPS - _WARM_UP} steps of the slowest worker; total_s: the time "
    f"of all {STEPS}; links carry {RATE_MBIT_S:g} Mbit/s in each direction",
}


class Case(NamedTuple):
    """A system of `experiments.emulation.systems` and one of `LOOPS`."""

    system: str
    loop: str


def run(case: Case) -> Dict[str, Any]:
    """Trains once, on hosts of its own. Raises RunFailed."""
    passes = _PASSES if case.loop == "passes" else 1
    loop = "plain" if case.loop == "passes" else case.loop
    worker = ["experiments.training.torch_worker", case.system, str(HOSTS), str(STEPS)]
    worker += ["--loop", loop, "--passes", str(passes)]
    with Cluster(HOSTS, RATE_MBIT_S) as cluster:
        ends = run_job(cluster, SYSTEMS[case.system], worker, _TIMEOUT_S, {}).ends
    ends_s = [max(of) for of in zip(*(end["ends_s"] for end in ends))]
    steps_s = [after - before for before, after in zip(ends_s, ends_s[1:])]
    return {
        "step_s": round(statistics.median(steps_s[_WARM_UP - 1 :]), 4),
        "total_s": round(ends_s[-1], 2),
        "loss": round(statistics.mean(end["losses"][-1] for end in ends), 4),
    }


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each system and loop: seconds of a step and of all steps, over the repetitions."""
    rows = []
    for system, loop in dict.fromkeys((run["system"], run["loop"]) for run in runs):
        of = [run for run in runs if (run["system"], run["loop"]) == (system, loop)]
        row: Dict[str, Any] = {"system": system, "loop": loop, "repetitions": len(of)}
        for name in ("step_s", "total_s"):
            row[name] = Spread.of([run[name] for run in of]).rounded(3)
        rows.append(row)
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        step, total = row["step_s"], row["total_s"]
        lines.append(
            f"{LOOPS[row['loop']]:38} {SYSTEMS[row['system']].title:34} "
            f"step {step['median']:.3f} s ({step['low']:.3f} to {step['high']:.3f}), "
            f"all {total['median']:.1f} s ({total['low']:.1f} to {total['high']:.1f}), "
            f"{row['repetitions']} times"
        )
    return "\n".join(lines)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument(
        "--bucket",
        choices=_BUCKETS,
        default="ddp_5mb",
        help="DDP's for all loops but the plain one",
    )
    chosen = parser.parse_args(argv)
    options.check_torch(chosen)
    loops = chosen.loops[:1] if chosen.quick else chosen.loops
    cases = [
        Case(system, loop)
        for loop in loops
        for system in ("p3kv_torch", *(_BUCKETS if loop == "plain" else [chosen.bucket]))
    ]
    records = Records(options.numbers_path(chosen, "torch_loops"), _ABOUT)
    turns.measure_each(records, chosen, cases * (1 if chosen.quick else chosen.repetitions), run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))


if __name__ == "__main__":
    main()
