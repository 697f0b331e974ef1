"""PyTorch: how long a step takes on a GPU that two throttled hosts share. Nothing is emulated.

A GPT of as many parameters as ResNet-50 trains on Python's library. p3kv.torch and
DistributedDataParallel, with gloo since NCCL takes no two ranks on one GPU, take turns. Run it with
a Python whose PyTorch sees the GPU, and that has what `p3kv[torch,experiments]` names:

python -m experiments.torch_gpu
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
RATES_MBIT_S = (1000.0, 3000.0, None)
STEPS = 20
_WARM_UP = 5
_SYSTEMS = ("p3kv_torch", "ddp_25mb", "ddp_5mb")
_TIMEOUT_S = 300.0
_SIZE = ("--width", "512", "--blocks", "8", "--batch", "512")
_ABOUT = {
    "what": f"seconds of a GPT's step, {HOSTS} hosts that share a GPU, AdamW",
    "computation": "real, in float32, on the GPU",
    "units": f"step_s: median of {STEPS - _WARM_UP} steps of the slowest worker; device_mb: the "
    "most memory of the GPU that a worker's tensors took; rate_mbit_s: of links, in each direction",
}


class Case(NamedTuple):
    """A system of `experiments.emulation.systems`, and what each link carries, or None."""

    system: str
    rate_mbit_s: Optional[float]


def run(case: Case) -> Dict[str, Any]:
    """Trains once, on hosts of its own. Raises RunFailed."""
    worker = ["experiments.training.torch_worker", case.system, str(HOSTS), str(STEPS)]
    worker += ["--device", "cuda", *_SIZE]
    with Cluster(HOSTS, case.rate_mbit_s) as cluster:
        ends = run_job(cluster, SYSTEMS[case.system], worker, _TIMEOUT_S, {}).ends
    ends_s = [max(of) for of in zip(*(end["ends_s"] for end in ends))]
    steps_s = [after - before for before, after in zip(ends_s, ends_s[1:])]
    return {
        "step_s": round(statistics.median(steps_s[_WARM_UP - 1 :]), 4),
        "loss": round(statistics.mean(end["losses"][-1] for end in ends), 5),
        "device_mb": round(max(end["device_bytes"] for end in ends) / 1e6),
    }


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each rate and system: seconds of a step over the repetitions."""
    rows = []
    for rate, system in dict.fromkeys((run["rate_mbit_s"], run["system"]) for run in runs):
        of = [run for run in runs if (run["rate_mbit_s"], run["system"]) == (rate, system)]
        rows.append(
            {
                "rate_mbit_s": rate,
                "system": system,
                "repetitions": len(of),
                "step_s": Spread.of([run["step_s"] for run in of]).rounded(),
                "losses": sorted({run["loss"] for run in of}),
                "device_mb": max(run["device_mb"] for run in of),
            }
        )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        step, rate = row["step_s"], row["rate_mbit_s"]
        lines.append(
            f"{'no limit' if rate is None else f'{rate:g} Mbit/s':12} "
            f"{SYSTEMS[row['system']].title:34} "
            f"step {step['median']:.3f} s ({step['low']:.3f} to {step['high']:.3f}), "
            f"loss {row['losses']}, {row['device_mb']} MB of the GPU, {row['repetitions']} times"
        )
    return "\n".join(lines)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    chosen = parser.parse_args(argv)
    options.check_torch(chosen)
    rates = RATES_MBIT_S[:1] if chosen.quick else RATES_MBIT_S
    cases = [Case(system, rate) for rate in rates for system in _SYSTEMS]
    records = Records(options.numbers_path(chosen, "torch_gpu"), _ABOUT)
    turns.measure_each(records, chosen, cases * (1 if chosen.quick else chosen.repetitions), run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))


if __name__ == "__main__":
    main()
