"""PyTorch: what consistency rules and codecs cost of the loss.

A small GPT trains on Python's library with two workers, by AdamW with the same settings for all.
Its loss is that of the servers' weights on modules that were not trained on.

python -m experiments.torch_losses
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster
from experiments.drawing.curves import Spread
from experiments.emulation.systems import SYSTEMS
from experiments.training.encodings import Encoding

WORKERS = 2
STEPS = 300
_QUICK_STEPS = 60
SEEDS = (1, 2)
_TOP = "topk:share=0.01"
WAYS = {
    "exact": Encoding("exact"),
    "bfloat16": Encoding("`bfloat16` both ways", "bfloat16", "bfloat16"),
    "2bit": Encoding("`2bit:threshold=0.1` of gradients", "2bit:threshold=0.1"),
    "topk": Encoding("`topk:share=0.01` of gradients", _TOP),
    "topk_both": Encoding("`topk:share=0.01` both ways", _TOP, _TOP),
    "delayed_1": Encoding("`delayed:staleness=1`", consistency="delayed:staleness=1"),
    "delayed_3": Encoding("`delayed:staleness=3`", consistency="delayed:staleness=3"),
    "predicted_3": Encoding(
        "`delayed:staleness=3,predict=true`", consistency="delayed:staleness=3,predict=true"
    ),
    "bounded_3": Encoding("`bounded:staleness=3`", consistency="bounded:staleness=3"),
    "lazy_3": Encoding("`bounded:staleness=3,lazy=1`", consistency="bounded:staleness=3,lazy=1"),
    "local_10": Encoding("`local:steps=10`", consistency="local:steps=10"),
    "local_50": Encoding("`local:steps=50`", consistency="local:steps=50"),
}
_TIMEOUT_S = 900.0
_ABOUT = {
    "what": f"loss of a small GPT by rule and codec, {WORKERS} workers, AdamW with a rate of 0.001",
    "computation": "real, with one thread in each worker; links have no limit",
    "units": "validation: loss of the servers' weights on text that is not trained on, in nats for "
    "a character",
}


class Case(NamedTuple):
    """One of `WAYS`, and a training."""

    way: str
    steps: int
    seed: int


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    system = SYSTEMS["p3kv_torch"]
    worker = ["experiments.training.torch_worker", "p3kv_torch", str(WORKERS), str(case.steps)]
    worker += ["--width", "64", "--blocks", "2", "--seed", str(case.seed)]
    with Cluster(WORKERS) as cluster:
        settings = WAYS[case.way].environment(case.steps)
        ends = run_job(cluster, system, worker, _TIMEOUT_S, settings).ends
    worker_0 = next(end for end in ends if end["rank"] == 0)
    return {"elems": worker_0["elems"], "validation": round(worker_0["validation"], 4)}


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each way: the loss at the end, over the seeds."""
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        losses = [run["validation"] for run in runs if run["way"] == way]
        rows.append({"way": way, "loss": Spread.of(losses)._asdict(), "seeds": len(losses)})
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as Markdown, for the pages."""
    lines = ["| | loss |", "|---|---|"]
    for row in table:
        loss = row["loss"]
        cell = f"{loss['median']:.2f} ({loss['low']:.2f} to {loss['high']:.2f})"
        lines.append(f"| {WAYS[row['way']].title} | {cell} |")
    return "\n".join(lines)


def main(argv: Optional[Sequence[str]] = None) -> None:
    chosen = turns.arguments(__doc__.splitlines()[0]).parse_args(argv)
    options.check_torch(chosen)
    records = Records(options.numbers_path(chosen, "torch_losses"), _ABOUT)
    seeds, steps = (SEEDS[:1], _QUICK_STEPS) if chosen.quick else (SEEDS, STEPS)
    cases = [Case(way, steps, seed) for seed in seeds for way in WAYS]
    turns.measure_each(records, chosen, cases, run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))


if __name__ == "__main__":
    main()
