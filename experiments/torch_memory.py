"""PyTorch: the memory of a worker, and of a server, while a GPT trains by AdamW on two hosts.

p3kv.torch, DistributedDataParallel with and without ZeroRedundancyOptimizer, and FSDP2, on CPUs.

python -m experiments.torch_memory
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.emulation.systems import SYSTEMS

HOSTS = 2
_STEPS = 4
_TIMEOUT_S = 900.0
_ABOUT = {
    "what": f"memory of a process at most, {HOSTS} hosts, {_STEPS} steps of a GPT by AdamW",
    "computation": "real, in float32, with one thread in each worker",
    "units": "model_mb: its parameters; worker_mb: more than before the model was made, of the "
    "worker that took most; server_mb: all of a server's process; links have no limit",
}


class Case(NamedTuple):
    """A system of `experiments.emulation.systems`, whether optimizer states are split among
    workers, and P3KV_UPDATES."""

    system: str
    zero: bool = False
    updates: str = ""


CASES = (
    Case("p3kv_torch"),
    Case("p3kv_torch", updates="servers"),
    Case("ddp_25mb"),
    Case("ddp_25mb", zero=True),
    Case("fsdp2"),
)


def run(case: Case, size: Sequence[str]) -> Dict[str, Any]:
    """Trains once, on hosts of its own. Raises RunFailed."""
    worker = ["experiments.training.torch_worker", case.system, str(HOSTS), str(_STEPS), *size]
    with Cluster(HOSTS, None) as cluster:
        settings = {"P3KV_UPDATES": case.updates} if case.updates else {}
        done = run_job(
            cluster, SYSTEMS[case.system], worker + ["--zero"] * case.zero, _TIMEOUT_S, settings
        )
    return {
        "model_mb": round(done.ends[0]["elems"] * 4e-6, 1),
        "worker_mb": round(max(end["memory_kib"] for end in done.ends) * 1.024e-3, 1),
        "server_mb": round(done.server_rss_kib * 1.024e-3, 1),
        "loss": round(done.ends[0]["losses"][-1], 4),
    }


def table_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs as text, with a worker's memory as a multiple of the model's."""
    lines: List[str] = []
    for one in runs:
        title = SYSTEMS[one["system"]].title + ", ZeroRedundancyOptimizer" * one["zero"]
        title += f", P3KV_UPDATES={one['updates']}" if one.get("updates") else ""
        lines.append(
            f"{title:58} model {one['model_mb']:.0f} MB, worker {one['worker_mb']:.0f} MB "
            f"({one['worker_mb'] / one['model_mb']:.1f} x), server {one['server_mb']:.0f} MB"
        )
    return "\n".join(lines)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    chosen = parser.parse_args(argv)
    options.check_torch(chosen)
    width, blocks = ("128", "2") if chosen.quick else ("768", "12")
    size = ["--width", width, "--blocks", blocks, "--batch", "2"]
    records = Records(options.numbers_path(chosen, "torch_memory"), _ABOUT)
    turns.measure_each(records, chosen, CASES, lambda case: run(case, size))
    print(table_text(records.runs))


if __name__ == "__main__":
    main()
