"""PyTorch: a table that no worker could hold, over the servers of four hosts, by ids of a batch.

`p3kv.torch.Embedding` of 12 GB and of a hundredth of that, SGD, a worker and a server on each host.
Links have no limit, and nothing else is computed: what is timed is the processor.

python -m experiments.large_table
"""

from __future__ import annotations

import statistics
from tempfile import TemporaryDirectory
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.campaign import options, turns
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing import curves, output
from experiments.emulation.systems import SYSTEMS

HOSTS, COLUMNS, STEPS = 4, 128, 15
LARGE_ROWS = 12 * 10**9 // (4 * COLUMNS)
IDS = (256, 1024, 4096, 16_384)
MORE_STEPS, MORE_IDS = 100, 4096
"""Steps that begin with a checkpoint, and their batches."""
_TIMEOUT_S = 1200.0
_ABOUT = {
    "figure": f"seconds of a step by ids of each worker's batch, {HOSTS} workers and {HOSTS} "
    "servers; ids are uniform over the table, so that rows hardly repeat",
    "computation": "the lookup, its gradient and SGD on the servers, no other layers; all on the "
    "processors of one machine, links without a limit",
    "units": "step_s: of the slowest worker, by ids and whether the next batch's were named before "
    "backward; server_rss_mib: the most that a server has held, each page of whose table was "
    "touched before, also while it writes a checkpoint; checkpoint_s: until all servers have "
    "written it; while_written_s: the steps that began with it, of 4096 ids, "
    "asked; worker_grown_mib: by how much the most that a worker has held exceeds what it "
    "held before it made the table",
}


class Case(NamedTuple):
    """A table of so many rows."""

    rows: int


def run(case: Case, steps: int = STEPS) -> Dict[str, Any]:
    """Trains once, on hosts of its own. Raises RunFailed."""
    worker = ["experiments.emulation.table_worker", str(case.rows), str(COLUMNS)]
    worker += ["--ids", *map(str, IDS), "--steps", str(steps)]
    worker += ["--more", str(MORE_STEPS), str(MORE_IDS)]
    with Cluster(HOSTS) as cluster, TemporaryDirectory(prefix="p3kv-table-") as folder:
        settings = {
            "P3KV_CHECKPOINT_DIR": folder,
            "P3KV_CHECKPOINT_EVERY": 3 * len(IDS) * 2 * (steps + 2),  # after all that is timed
        }
        worker += ["--checkpoint", folder]
        job = run_job(cluster, SYSTEMS["p3kv_torch"], worker, _TIMEOUT_S, settings)
    step_s: Dict[str, Dict[str, List[float]]] = {}
    for ids in IDS:
        for name, prefetches in (("asked", False), ("prefetched", True)):
            of_workers = [end["measured"][f"{ids} {prefetches}"] for end in job.ends]
            slowest = [round(max(taken), 5) for taken in zip(*of_workers)]
            step_s.setdefault(name, {})[str(ids)] = slowest
    return {
        "columns": COLUMNS,
        "hosts": HOSTS,
        "step_s": step_s,
        "while_written_s": [
            round(max(taken), 5) for taken in zip(*(end["while_written"] for end in job.ends))
        ],
        "checkpoint_s": round(
            max(sum(end["while_written"]) + end["waited_s"] for end in job.ends), 1
        ),
        "touched_s": round(max(end["touched_s"] for end in job.ends), 1),
        "server_rss_mib": job.server_rss_kib // 1024,
        "worker_grown_mib": max(end["grown_kib"] for end in job.ends) // 1024,
    }


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each table, way and number of ids."""
    rows = []
    for count in sorted({run["rows"] for run in runs}, reverse=True):
        of = [run for run in runs if run["rows"] == count]
        while_written = statistics.median(one for run in of for one in run["while_written_s"])
        for way in ("asked", "prefetched"):
            for ids in IDS:
                taken = [one for run in of for one in run["step_s"][way][str(ids)]]
                low, _, high = statistics.quantiles(taken, n=4)
                rows.append(
                    {
                        "table_gb": round(count * COLUMNS * 4 / 1e9, 2),
                        "way": way,
                        "ids": ids,
                        "step_s": round(statistics.median(taken), 5),
                        "quartiles_s": [round(low, 5), round(high, 5)],
                        "server_rss_mib": max(run["server_rss_mib"] for run in of),
                        "worker_grown_mib": max(run["worker_grown_mib"] for run in of),
                        "checkpoint_s": max(run["checkpoint_s"] for run in of),
                        "while_written_s": round(while_written, 5),
                    }
                )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        low, high = (1e3 * one for one in row["quartiles_s"])
        lines.append(
            f"{row['table_gb']:6.2f} GB {row['way']:10} {row['ids']:6} ids: "
            f"{row['step_s'] * 1e3:7.1f} ms ({low:.1f} to {high:.1f}), server "
            f"{row['server_rss_mib']} MiB, worker +{row['worker_grown_mib']} MiB; checkpoint "
            f"{row['checkpoint_s']} s, steps of {MORE_IDS} ids meanwhile "
            f"{row['while_written_s'] * 1e3:.1f} ms"
        )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Seconds of a step against ids."""
    output.style()
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    for size in dict.fromkeys(row["table_gb"] for row in table):
        for way, line in (("asked", "-"), ("prefetched", "--")):
            of = [row for row in table if (row["table_gb"], row["way"]) == (size, way)]
            axis.plot(
                [row["ids"] for row in of], [row["step_s"] * 1e3 for row in of], line, marker="o",
                color="C0" if size > 1 else "C1", label=f"{size:g} GB, {way}",
            )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="ids of a batch", ylabel="ms a step")
    axis.legend()
    return figure


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2, metavar="N")
    chosen = parser.parse_args(argv)
    options.check_torch(chosen)
    cases = [Case(LARGE_ROWS), Case(LARGE_ROWS // 100)]
    if chosen.quick:
        cases = [Case(LARGE_ROWS // 10), Case(LARGE_ROWS // 1000)]
    records = Records(options.numbers_path(chosen, "large_table"), _ABOUT)
    turns.measure_each(records, chosen, cases * (1 if chosen.quick else chosen.repetitions), run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
