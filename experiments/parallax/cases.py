"""What is measured: a way to train one of Parallax's models on some hosts, and its throughput."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from experiments.campaign.job import run_job
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.emulation.systems import SYSTEMS
from experiments.models.parallax import LINK_BIT_S, SCALE, sparse_model

DILATION = 8.0
"""How much longer than the paper's GPUs workers compute, so that two cores carry eight hosts."""
RATE_MBIT_S = LINK_BIT_S / SCALE / DILATION / 1e6
_SETTINGS = {"P3KV_SLICE_SIZE": 25_000}
"""Set because links have no limit until the tables are there, which would take minutes: p3kv would
measure that."""
_TIMEOUT_S = 1200.0  # whole tables of LM, each on one server, take 127 s an iteration


class Way(NamedTuple):
    """A system, its settings, and whether tables travel whole."""

    title: str
    system: str = "p3kv"
    settings: Tuple[Tuple[str, object], ...] = ()
    dense: bool = False


_MXNETS_PARTS = ("MXNET_KVSTORE_BIGARRAY_BOUND", 1_000_000 // SCALE)
"""The elements from which on MXNet divides an array among servers, scaled as arrays are."""
_NO_SUMS = ("P3KV_LOCAL_AGGREGATION", 0)
_WHOLE = ("P3KV_PLACEMENT", "whole_tensors")
_FIFO = ("P3KV_PRIORITIES", 0)
WAYS = {
    "p3kv": Way("p3kv"),
    "dist_sync": Way("MXNet dist_sync", "dist_sync", (_MXNETS_PARTS,)),
    "horovod": Way("Horovod with gloo", "horovod"),
    "no_sums": Way("no sums on hosts", settings=(_NO_SUMS,)),
    "dense": Way("tables travel whole", dense=True),
    "whole": Way("no parts: arrays whole on a server", settings=(_WHOLE,)),
    "fifo": Way("no priorities", settings=(_FIFO,)),
    "base": Way("base: none of these", settings=(_NO_SUMS, _WHOLE, _FIFO), dense=True),
    "base_rows": Way("+ rows", settings=(_NO_SUMS, _WHOLE, _FIFO)),
    "base_sums": Way("+ sums on hosts", settings=(_WHOLE, _FIFO)),
    "base_parts": Way("+ parts of arrays", settings=(_FIFO,)),
}
"""By name; those from "base" on add one thing after the other, until "p3kv"."""


class Case(NamedTuple):
    """A way to train a model on so many hosts with so many workers each; None: its own alpha."""

    way: str
    model: str
    hosts: int
    per_host: int = 1
    alpha: Optional[float] = None


def available(ways: Sequence[str]) -> List[str]:
    """Those whose systems are here; says which are not, and what to do."""
    found = []
    for way in ways:
        missing = SYSTEMS[WAYS[way].system].missing
        if missing is None:
            found.append(way)
        else:
            print(f"left out: {missing}")
    return found


def run(case: Case, iterations: int, warm_up: int) -> Dict[str, Any]:
    """Measures a case on a cluster of its own. Raises RunFailed."""
    way = WAYS[case.way]
    worker = ["experiments.emulation.sparse_worker", case.model, way.system]
    worker += [f"--dilation={DILATION}", f"--iterations={iterations}", f"--warm-up={warm_up}"]
    worker += ["--dense"] if way.dense else []
    worker += [] if case.alpha is None else [f"--alpha={case.alpha}"]
    settings: Mapping[str, object] = {**_SETTINGS, **dict(way.settings)}
    sent: List[int] = []
    with Cluster(case.hosts) as cluster:
        job = run_job(
            cluster, SYSTEMS[way.system], worker, _TIMEOUT_S, settings, _limited(cluster, sent),
            per_host=case.per_host,
        )  # fmt: skip
    return {
        "rate_mbit_s": RATE_MBIT_S,
        "dilation": DILATION,
        "compute_s": job.ends[0]["compute_s"],
        "iteration_s": [
            round(max(times), 5) for times in zip(*(end["iteration_s"] for end in job.ends))
        ],
        "sent_bytes": sent[0] // (iterations + warm_up),
        "cpu_s": round(job.cpu_s, 2),
    }


@contextlib.contextmanager
def _limited(cluster: Cluster, sent: List[int]) -> Iterator[None]:
    """Limits the links, and counts what the first host sends."""
    cluster.set_rate(RATE_MBIT_S)
    before = cluster.interface_counters(cluster.hosts[0])[1]
    try:
        yield
    finally:
        sent.append(cluster.interface_counters(cluster.hosts[0])[1] - before)
        cluster.set_rate(None)


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each case: words or images a second of all workers, before dilation."""
    rows = []
    for case in dict.fromkeys(Case(*(one[name] for name in Case._fields)) for one in runs):
        of = curves.select(runs, **case._asdict())
        if not of:
            continue
        batches = case.hosts * case.per_host * sparse_model(case.model).model.batch_size
        seconds = curves.spread_s(of)
        rows.append(
            {
                **case._asdict(),
                "runs": len(of),
                "throughput": curves.throughput(seconds, batches * of[0]["dilation"])._asdict(),
                "iteration_s": seconds._asdict(),
                "compute_s": of[0]["compute_s"],
                "sent_bytes": curves.Spread.of([one["sent_bytes"] for one in of]).median,
            }
        )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        taken, made = row["iteration_s"], row["throughput"]
        alpha = "" if row["alpha"] is None else f" alpha {row['alpha']:<4g}"
        lines.append(
            f"{row['model']:<8} {row['hosts']} x {row['per_host']}{alpha} "
            f"{WAYS[row['way']].title:<34} {made['median']:8.0f} "
            f"{sparse_model(row['model']).unit}/s, {taken['median']:.3f} s ({taken['low']:.3f} to "
            f"{taken['high']:.3f}; computing {row['compute_s']:.3f}), "
            f"sends {row['sent_bytes'] / 1e6:.2f} MB"
        )
    return "\n".join(lines)
