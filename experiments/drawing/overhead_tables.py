"""What synchronising costs, as tables: rounds and iterations with their processor time, memory,
round trips of small keys and a large one, steps of small transformers, `Trainer.step`.

Runs are records as `experiments.overhead` keeps them.
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, Sequence

from experiments.drawing import curves
from experiments.drawing.curves import Spread
from experiments.models import load

PEER = "dist_sync"
"""The system that the others are compared with; its runs come first."""
_Record = Mapping[str, Any]
_STEPS = {"pending_step_s": "while backward goes on", "ready_step_s": "gradients are ready"}


def report(runs: Sequence[_Record]) -> str:
    """Returns the tables of what was measured: rounds and iterations with their processor time,
    memory, round trips of small keys, `Trainer.step`."""
    timed = [run for run in runs if "iteration_s" in run]
    rounds = [run for run in timed if "ratio" not in run]
    limited = [run for run in timed if "ratio" in run]
    small = [run for run in runs if "round_trip_s" in run]
    large = [run for run in runs if "trip_s" in run]
    blocks = [run for run in runs if "tensors" in run]
    steps = [run for run in runs if "parameters" in run]
    systems = list(dict.fromkeys(run["system"] for run in runs))
    lines = []
    if rounds:
        lines += _times("one round", _by("model", rounds), systems) + _memory(rounds, systems)
    if limited:
        by_ratio = _by("ratio", limited)
        titled = {f"ResNet-50, M/C = {ratio:g}": by_ratio[ratio] for ratio in sorted(by_ratio)}
        lines += _times("one iteration", titled, systems)
    if small:
        lines += _quartiles("round trip", "round_trip_s", _by("case", small), systems)
    if large:
        lines += _quartiles("round trip", "trip_s", _by("case", large), systems)
    if blocks:
        lines += _quartiles("one step", "step_s", _by("case", blocks), systems)
    if steps:
        lines += _steps(steps, systems)
    return "\n".join(lines)


def _by(name: str, runs: Sequence[_Record]) -> Dict[Any, List[_Record]]:
    """Runs by one of their facts, in the order in which they were measured."""
    found: Dict[Any, List[_Record]] = {}
    for run in runs:
        found.setdefault(run[name], []).append(run)
    return found


def _memory(rounds: Sequence[_Record], systems: Sequence[str]) -> List[str]:
    lines = ["", f"{'MiB beyond':20}{'':12}{'worker':>10}{'server':>10}"]
    for model, runs in _by("model", rounds).items():
        for system in systems:
            of = _of(runs, system=system)
            if of:
                worker, server = (max(each) for each in zip(*map(_beyond_mib, of)))
                lines.append(f"{model:20}{system:12}{worker:>10.0f}{server:>10.0f}")
    told = (
        "A worker's beyond weights and gradients, a server's beyond its part of weights and sums."
    )
    return [*lines, told]


def _quartiles(
    title: str, name: str, cases: Mapping[str, Sequence[_Record]], systems: Sequence[str]
) -> List[str]:
    """A table of each case's times, by system; the first system is the peer."""
    lines = ["", f"{title:26}{'':12}{'median':>11}{'quartiles':>22}{'of peer':>9}"]
    for case, runs in cases.items():
        peer_s = None
        for system in systems:
            of = _of(runs, system=system)
            times_s = [s for run in of for s in run[name]]
            if not times_s:
                continue
            low_s, median_s, high_s = statistics.quantiles(times_s, n=4)
            peer_s = peer_s or median_s
            quartiles = f"{low_s * 1e3:.2f} - {high_s * 1e3:.2f} ms"
            line = f"{case:26}{system:12}{median_s * 1e3:>8.2f} ms{quartiles:>22}"
            line += f"{median_s / peer_s:>9.2f}"
            if "size_bytes" in of[0]:
                line += f"  {8e-9 * of[0]['size_bytes'] / median_s:.1f} Gbit/s each way"
            lines.append(line)
    return lines


def _steps(runs: Sequence[_Record], systems: Sequence[str]) -> List[str]:
    lines = ["", f"{'Trainer.step':24}{'':12}{'median':>10}{'slowest':>10}  us a parameter"]
    for name, title in _STEPS.items():
        for system in systems:
            of = _of(runs, system=system)
            times_us = [1e6 * s / run["parameters"] for run in of for s in run[name]]
            if times_us:
                median, slowest = statistics.median(times_us), max(times_us)
                lines.append(f"{title:24}{system:12}{median:>10.1f}{slowest:>10.1f}")
    return lines


def _times(title: str, cases: Mapping[str, Sequence[_Record]], systems: Sequence[str]) -> List[str]:
    """A table of each case's times and processor time, by system."""
    lines = ["", f"{title:22}{'':12}{'median':>11}{'spread':>22}{'of peer':>9}{'CPU s/GB':>10}"]
    for case, runs in cases.items():
        peer_s = None
        for system in systems:
            of = _of(runs, system=system)
            if not of:
                continue
            seconds = Spread.of([statistics.median(run["iteration_s"]) for run in of])
            if system == PEER:
                peer_s = seconds.median
            share = "-" if peer_s is None else f"{seconds.median / peer_s:.2f}"
            spread = f"{seconds.low * 1e3:.1f} - {seconds.high * 1e3:.1f} ms"
            cpu = statistics.median(curves.cpu_s_per_gb(run) for run in of)
            lines.append(
                f"{case:22}{system:12}{seconds.median * 1e3:>8.1f} ms{spread:>22}{share:>9}"
                f"{cpu:>10.2f}"
            )
    return lines


def _of(runs: Sequence[_Record], **facts: object) -> List[_Record]:
    return [run for run in runs if facts.items() <= run.items()]


def _beyond_mib(run: Mapping[str, Any]) -> Sequence[float]:
    """What a worker and a server hold beyond what any store must hold there."""
    part_kib = load(run["model"]).size_bytes / run["hosts"] / 1024
    worker_kib = run["worker_rss_kib"] - run["arrays_rss_kib"]
    server_kib = run["server_rss_kib"] - run["idle_server_rss_kib"] - 2 * part_kib
    return worker_kib / 1024, server_kib / 1024
