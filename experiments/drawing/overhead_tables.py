"""What synchronising costs, as tables: rounds and iterations with their processor time, memory,
`Trainer.step`.

Runs are records as `experiments.overhead` keeps them.
"""

from __future__ import annotations

import statistics
from typing import Any, List, Mapping, Sequence

from experiments.drawing.curves import Spread
from experiments.models import load

PEER = "dist_sync"
"""The system that the others are compared with; its runs come first."""
_Record = Mapping[str, Any]
_STEPS = {"pending_step_s": "while backward goes on", "ready_step_s": "gradients are ready"}


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables: rounds and iterations with their processor time, memory,
    `Trainer.step`."""
    timed = [run for run in runs if "iteration_s" in run]
    rounds = [run for run in timed if "ratio" not in run]
    models = list(dict.fromkeys(run["model"] for run in rounds))
    systems = list(dict.fromkeys(run["system"] for run in runs))
    lines = _times("one round", {model: _of(rounds, model=model) for model in models}, systems)
    limited = [run for run in timed if "ratio" in run]
    if limited:
        ratios = sorted({run["ratio"] for run in limited})
        by_ratio = {f"ResNet-50, M/C = {ratio:g}": _of(limited, ratio=ratio) for ratio in ratios}
        lines += _times("one iteration", by_ratio, systems)
    lines += ["", f"{'MiB beyond':20}{'':12}{'worker':>10}{'server':>10}"]
    for model in models:
        for system in systems:
            of = _of(rounds, model=model, system=system)
            if of:
                worker, server = (max(each) for each in zip(*map(_beyond_mib, of)))
                lines.append(f"{model:20}{system:12}{worker:>10.0f}{server:>10.0f}")
    lines += [
        "A worker's beyond weights and gradients, a server's beyond its part of weights and sums.",
        "",
        f"{'Trainer.step':24}{'':12}{'median':>10}{'slowest':>10}  us a parameter",
    ]
    for name, title in _STEPS.items():
        for system in systems:
            steps = [run for run in runs if name in run and run["system"] == system]
            times_us = [1e6 * s / run["parameters"] for run in steps for s in run[name]]
            if times_us:
                median, slowest = statistics.median(times_us), max(times_us)
                lines.append(f"{title:24}{system:12}{median:>10.1f}{slowest:>10.1f}")
    return "\n".join(lines)


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
            cpu = statistics.median(_cpu_s_per_gb(run) for run in of)
            lines.append(
                f"{case:22}{system:12}{seconds.median * 1e3:>8.1f} ms{spread:>22}{share:>9}"
                f"{cpu:>10.2f}"
            )
    return lines


def _of(runs: Sequence[_Record], **facts: object) -> List[_Record]:
    return [run for run in runs if facts.items() <= run.items()]


def _cpu_s_per_gb(run: Mapping[str, Any]) -> float:
    """Processor time of all processes for each gigabyte that a worker synchronises."""
    size_bytes = load(run["model"]).size_bytes
    return run["cpu_s"] / (len(run["iteration_s"]) * run["hosts"] * size_bytes / 1e9)


def _beyond_mib(run: Mapping[str, Any]) -> Sequence[float]:
    """What a worker and a server hold beyond what any store must hold there."""
    part_kib = load(run["model"]).size_bytes / run["hosts"] / 1024
    worker_kib = run["worker_rss_kib"] - run["arrays_rss_kib"]
    server_kib = run["server_rss_kib"] - run["idle_server_rss_kib"] - 2 * part_kib
    return worker_kib / 1024, server_kib / 1024
