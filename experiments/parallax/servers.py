"""Throughput by the number of servers, and the choice of `p3kv tune`: tables 2, 5 of the paper."""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.drawing import curves, output
from experiments.models.parallax import sparse_model
from p3kv.config.trials import P3KV
from p3kv.tools.trials import TrialJob, Trials
from p3kv.tools.tune import fit, tune

MODEL, WORKERS, DILATION = "lm", 2, 1.0
ROW_S = 50e-6
"""What a server waits for each row that it updates."""
MOST = 8
STEPS, ROUNDS = 20, 2
_SETTINGS = {
    "P3KV_OPTIMIZERS": "experiments.emulation.costly_rows", "OMP_NUM_THREADS": "1",
    "P3KV_LOCAL_AGGREGATION": "0", "ROW_S": str(ROW_S),
}  # fmt: skip
ABOUT = {
    "figure": "time of a step by the number of servers, and the choice of p3kv tune beside the "
    "best of all numbers: tables 2 and 5 of the paper",
    "computation": "emulated by timed waits, that of the servers, too: "
    f"{1e6 * ROW_S:g} us for each row, so that it takes none of this machine's cores. {WORKERS} "
    "workers and all servers on one machine, without a limit on their link",
    "units": "iteration_s: of the measured steps, on the slowest worker; by_servers: what p3kv "
    "tune has measured, each round's mean step",
}


class Case(NamedTuple):
    """`p3kv tune` (servers: 0), or a trial with so many servers."""

    servers: int
    most: int


def cases(quick: bool) -> List[Case]:
    """The tuning, then all numbers of servers in turn."""
    most = 3 if quick else MOST
    rounds = 1 if quick else ROUNDS
    found = [Case(0, most)]
    for number in range(rounds):
        found += [Case(count, most) for count in range(1, most + 1)][:: -1 if number % 2 else 1]
    return found


def run(case: Case) -> Dict[str, Any]:
    """Tunes, or runs a trial. Raises TrialFailed."""
    os.environ.update(_SETTINGS)
    script = "experiments.emulation.costly_script"
    command = [sys.executable, "-m", script, MODEL, str(DILATION)]
    job = TrialJob(command, WORKERS, case.servers)
    if case.servers == 0:
        rounds = 1 if case.most < MOST else ROUNDS
        found = tune(job, case.most, (), STEPS, rounds, print, None)
        by_servers = {str(count): one.steps_s for count, one in found.by_servers.items()}
        return {"choice": found.servers, "confidence": found.confidence, "by_servers": by_servers}
    trials = Trials(STEPS, print, None)
    reports = trials.run(job, f"{case.servers} servers", P3KV)
    return {"iteration_s": trials.steps.each_s(max(reports, key=trials.steps.mean_s))}


def summarize(runs: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """Steps by servers, the equation, and how far the choice is from the best."""
    by_servers: Dict[int, List[float]] = {}
    for one in runs:
        if one["servers"]:
            mean_s = statistics.fmean(one["iteration_s"])
            by_servers.setdefault(one["servers"], []).append(mean_s)
    step_s = {count: statistics.median(times) for count, times in sorted(by_servers.items())}
    tuned = next(one for one in runs if not one["servers"])
    found = {"by_servers": by_servers, "choice": tuned["choice"], "tuned": tuned["by_servers"]}
    found["confidence"] = tuned["confidence"]
    if step_s:
        best = min(step_s, key=lambda count: step_s[count])
        found.update(
            equation=fit(step_s)._asdict(),
            best=best,
            choice_behind=round(step_s[tuned["choice"]] / step_s[best] - 1, 4),
        )
    return found


def table_text(found: Mapping[str, Any]) -> str:
    """`summarize`'s numbers as text."""
    lines = [
        f"{count} servers: {1000 * statistics.median(times):.1f} ms "
        f"({1000 * min(times):.1f} to {1000 * max(times):.1f})"
        for count, times in sorted(found["by_servers"].items())
    ]
    lines.append(
        f"p3kv tune chooses {found['choice']} (sure to {found['confidence']:.0%}), the full search "
        f"{found['best']}: the choice is {found['choice_behind']:.1%} slower. {found['equation']}"
    )
    return "\n".join(lines)


def draw(found: Mapping[str, Any]) -> Figure:
    """Words a second against servers, with the equation and the choice."""
    output.style()
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    words = WORKERS * sparse_model(MODEL).model.batch_size
    by_servers = {int(count): times for count, times in found["by_servers"].items()}
    for label, times_s, colour, marker in (
        ("full search", by_servers, output.COLOURS["p3"], "o"),
        ("p3kv tune", {int(c): t for c, t in found["tuned"].items()}, "#E69F00", "s"),
    ):
        counts = sorted(times_s)
        medians = [words / statistics.median(times_s[count]) for count in counts]
        low = [words / max(times_s[count]) for count in counts]
        high = [words / min(times_s[count]) for count in counts]
        errors = [
            [one - least for one, least in zip(medians, low)],
            [most - one for one, most in zip(medians, high)],
        ]
        axis.errorbar(
            counts, medians, errors, color=colour, marker=marker, linestyle="none", capsize=2.5,
            markersize=4, label=label,
        )  # fmt: skip
    equation = fit({c: statistics.median(t) for c, t in by_servers.items()})
    places = [1 + at / 50 for at in range(50 * (max(by_servers) - 1) + 1)]
    axis.plot(places, [words / equation.step_s(at) for at in places], "-", color="black",
              linewidth=1, label="equation, fitted to the full search")  # fmt: skip
    axis.axvline(found["choice"], color="#E69F00", linestyle=":", label="choice of p3kv tune")
    axis.set_xticks(range(1, max(by_servers) + 1))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("servers")
    axis.set_ylabel("words/s")
    axis.set_title(
        f"LM, {WORKERS} workers and all servers on one machine; servers wait "
        f"{1e6 * ROW_S:g} us for each row", fontsize=8,
    )  # fmt: skip
    axis.legend(fontsize=7, loc="lower right")
    curves.foot(figure, [])
    return figure
