"""A language model with a table of rows, really trained: p3kv, dist_sync and one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from experiments.campaign.job import RunFailed, run_job
from experiments.cluster import Cluster
from experiments.drawing import curves, output
from experiments.emulation.systems import SYSTEMS

HOSTS, PER_HOST = 2, 2
RATE_MBIT_S = 50.0
PERPLEXITY = 120.0
"""What a training is to reach, by modules that it does not read."""
VALIDATE_EVERY = 25
_ALONE = "alone"
_TITLES = {_ALONE: "one process", "dist_sync": "MXNet dist_sync", "p3kv": "p3kv"}
_ROOT = Path(__file__).parent.parent.parent
_WORKER = "experiments.training.words_worker"
ABOUT = {
    "figure": "perplexity of a language model by time and by steps: an LSTM with an embedding by "
    f"rows, on words of Python's library; {HOSTS} hosts with {PER_HOST} workers each",
    "computation": "real",
    "units": f"rate_mbit_s: each link, each direction; step_s: the slowest worker's; losses: mean "
    f"of all workers' batches; perplexities: every {VALIDATE_EVERY} steps, of other modules",
}


class Case(NamedTuple):
    """A system, and how many steps it makes."""

    system: str
    steps: int


def cases(quick: bool) -> List[Case]:
    """One process, then the others in turn."""
    return [Case(system, 50 if quick else 200) for system in _TITLES]


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    workers = HOSTS * PER_HOST
    options = [f"--workers={workers}", f"--steps={case.steps}"]
    options.append(f"--validate-every={VALIDATE_EVERY}")
    if case.system == _ALONE:
        ends = [_alone(options)]
    else:
        with Cluster(HOSTS, RATE_MBIT_S) as cluster:
            ends = run_job(
                cluster, SYSTEMS[case.system], [_WORKER, case.system, *options], 1200.0, {},
                per_host=PER_HOST,
            ).ends  # fmt: skip
    losses = [sum(of) / len(ends) for of in zip(*(end["losses"] for end in ends))]
    return {
        "rate_mbit_s": RATE_MBIT_S,
        "step_s": [round(max(of), 5) for of in zip(*(end["step_s"] for end in ends))],
        "losses": losses,
        "perplexities": next(end["perplexities"] for end in ends if end["rank"] == 0),
    }


def _alone(options: Sequence[str]) -> Dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", _WORKER, _ALONE, *options],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise RunFailed("one process did not come to its end")
    end: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return end


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """By system: the time until PERPLEXITY, the last one, and how far losses are from those of one
    process."""
    rows = []
    exact = next((one["losses"] for one in runs if one["system"] == _ALONE), None)
    for one in runs:
        reached = _reached(one["perplexities"])
        row = {
            "system": one["system"],
            "step_s": curves.Spread.of(one["step_s"])._asdict(),
            "perplexity": round(one["perplexities"][-1], 2),
            "steps_until": reached,
            "seconds_until": None if reached is None else round(sum(one["step_s"][:reached]), 1),
        }
        if exact is not None:
            row["loss_off"] = max(abs(a - b) / b for a, b in zip(one["losses"], exact))
        rows.append(row)
    return rows


def _reached(perplexities: Sequence[float]) -> Optional[int]:
    """After how many steps a perplexity was enough; None if never."""
    places = (at for at, one in enumerate(perplexities) if one <= PERPLEXITY)
    at = next(places, None)
    return None if at is None else at * VALIDATE_EVERY


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    return "\n".join(
        f"{_TITLES[row['system']]:<15} {1000 * row['step_s']['median']:.0f} ms a step, perplexity "
        f"{row['perplexity']:.1f} at the end, {PERPLEXITY:g} after {row['steps_until']} steps and "
        f"{row['seconds_until']} s; losses at most {row.get('loss_off', 0):.1e} off"
        for row in table
    )


def draw(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Perplexity by steps, where all lie on each other, and by time."""
    output.style()
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), sharey=True)
    looks = {_ALONE: ("black", "-"), "dist_sync": ("#CC79A7", "--"), "p3kv": ("#0072B2", ":")}
    for one in runs:
        colour, line = looks[one["system"]]
        steps = [at * VALIDATE_EVERY for at in range(len(one["perplexities"]))]
        times = [0.0, *itertools.accumulate(one["step_s"])]
        for axis, places in ((axes[0], steps), (axes[1], [times[at] for at in steps])):
            axis.plot(places, one["perplexities"], line, color=colour, label=_TITLES[one["system"]])
    for axis, title in zip(axes, ("steps", "seconds of training")):
        axis.axhline(PERPLEXITY, color="#999999", linewidth=0.8)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel(title)
    axes[0].set_ylabel("perplexity of other modules")
    axes[0].set_title("words of Python's library, embedding by rows", fontsize=9)
    axes[1].set_title(
        f"{HOSTS} hosts x {PER_HOST} workers, {RATE_MBIT_S:g} Mbit/s; real computing", fontsize=9
    )
    axes[0].legend(fontsize=7)
    return figure
