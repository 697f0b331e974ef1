"""Trains for hours while links change, and shows that nothing grows and no weight is wrong.

    python -m scripts.soak --hours 8 --output output

Four hosts, as network namespaces, each with a worker and a server. In each round every worker
compares its weights, bit for bit, with those of a training in its own process. All the time links
get other rates, and now and then one is cut for some seconds. Memory, descriptors and threads of
all processes are written to `soak.json` and drawn in `soak.png`. Ends with an error if they grow,
or if the job fails. Needs root; takes little of the processor.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import psutil
from matplotlib.figure import Figure
from scipy.stats import theilslopes

from experiments.cluster import Cluster
from experiments.drawing.output import COLOURS, save, style
from tests.faults import goes_on, rounds
from tests.jobs import eventually, start_on

_HOSTS = 4
_PAUSE_S = 0.4
"""Between two rounds: the rest of the machine has other work."""
_SAMPLE_S = 5.0
_RATE_EVERY_S = 20.0
_RATES_MBIT_S = (2.0, 5.0, 20.0, 100.0, 1000.0)
_CUT_EVERY_S = 75.0
_CUT_S = (1.0, 6.0)
_WARM_UP = 0.25
"""The part of the time in which everything may grow."""
_MAY_GROW = {"rss_mib": 0.02, "descriptors": 0.0, "threads": 0.0}
"""By how much, as a share of the median, from the warm-up to the end."""
_LOOKS_OF_ROLES = {"worker": "p3", "server": "emphasis", "scheduler": "bound"}


class Sample(NamedTuple):
    """What a process has at some time; `rss_mib` are MiB of memory."""

    at_s: float
    rss_mib: float
    descriptors: int
    threads: int


class Soak:
    """A job on a cluster that is entered, its samples, and what was done to its links."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int) -> None:
        self.samples: Dict[str, List[Sample]] = {}
        self.events: List[Dict[str, Any]] = []
        self._cluster = cluster
        self._folder = folder
        self._chance = random.Random(seed)
        self._started = start_on(cluster, "enduring.py", [folder, _PAUSE_S], P3KV_DETERMINISTIC=1)
        counts = dict.fromkeys(_LOOKS_OF_ROLES, 0)
        self._processes = {}
        for role, process in self._started:
            self._processes[f"{role} on host {counts[role]}"] = psutil.Process(process.pid)
            counts[role] += 1
        self._start_s = time.monotonic()

    def train(self, seconds: float) -> None:
        """Disturbs the job for so long, and looks at it; raises when it does not go on."""
        eventually(lambda: rounds(self._folder) > 5, timeout_s=120.0)
        next_rate_s, next_cut_s = 0.0, _CUT_EVERY_S
        while (now_s := self._now_s()) < seconds:
            if now_s >= next_cut_s:
                self._cut()
                next_cut_s = self._now_s() + _CUT_EVERY_S
            elif now_s >= next_rate_s:
                host, rate = self._chance.choice(self._cluster.hosts), self._rate()
                self._event(f"{rate} Mbit/s", host.name, 0.0)
                self._cluster.set_rate(rate, host)
                next_rate_s = now_s + _RATE_EVERY_S
            self._look()
            time.sleep(_SAMPLE_S)
        self._cluster.set_rate(None)

    def end(self) -> int:
        """Ends the training; returns its rounds, or raises if any process failed."""
        count = rounds(self._folder)
        (self._folder / "stop").touch()
        outputs = [(role, process.communicate(timeout=120)[0]) for role, process in self._started]
        if any(process.returncode for _, process in self._started):
            raise SystemExit("\n".join(f"{role} said: {output}" for role, output in outputs))
        exact = [output for role, output in outputs if role == "worker"]
        if not all("bit for bit the weights of one process" in output for output in exact):
            raise SystemExit(f"weights were not compared: {exact}")
        return count

    def _rate(self) -> float:
        return self._chance.choice(_RATES_MBIT_S)

    def _cut(self) -> None:
        host, cut_s = self._chance.choice(self._cluster.hosts), self._chance.uniform(*_CUT_S)
        self._event("cut", host.name, cut_s)
        with self._cluster.cut(host):
            time.sleep(cut_s)
        goes_on(self._folder, timeout_s=120.0)

    def _event(self, what: str, host: str, seconds: float) -> None:
        self.events.append(
            {"at_s": round(self._now_s(), 1), "what": what, "host": host, "s": round(seconds, 1)}
        )

    def _look(self) -> None:
        at_s = round(self._now_s(), 1)
        for name, process in self._processes.items():
            with process.oneshot():
                sample = Sample(
                    at_s, process.memory_info().rss / 2**20, process.num_fds(),
                    process.num_threads(),
                )  # fmt: skip
            self.samples.setdefault(name, []).append(sample)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s


def growth(samples: List[Sample]) -> Dict[str, Dict[str, float]]:
    """What a process has after the warm-up, and by which share of it that grew until the end.

    By the median of the slopes between all pairs of samples, which single peaks do not move.
    """
    warm = samples[int(len(samples) * _WARM_UP) :]
    at_s = np.array([sample.at_s for sample in warm])
    found = {}
    for what in _MAY_GROW:
        values = np.array([getattr(sample, what) for sample in warm], float)
        grown = theilslopes(values, at_s).slope * (at_s[-1] - at_s[0])
        middle = float(np.median(values))
        found[what] = {"median": round(middle, 2), "grown": round(grown / middle, 4)}
    return found


def draw(samples: Dict[str, List[Sample]], events: List[Dict[str, Any]]) -> Figure:
    style()
    titles = {"rss_mib": "memory (MiB)", "descriptors": "descriptors", "threads": "threads"}
    figure, axes = plt.subplots(len(titles), sharex=True, figsize=(8, 7))
    for place, (what, title) in zip(axes, titles.items()):
        for name, course in samples.items():
            role = name.partition(" ")[0]
            place.plot(
                [sample.at_s / 60 for sample in course],
                [getattr(sample, what) for sample in course],
                color=COLOURS[_LOOKS_OF_ROLES[role]], linewidth=0.8,
                label=role if name.endswith("host 0") else None,
            )  # fmt: skip
        for event in events:
            if event["what"] == "cut":
                place.axvline(event["at_s"] / 60, color=COLOURS["baseline"], linewidth=0.5)
        place.set_title(title)
        place.set_ylim(bottom=0)
    axes[0].legend(loc="lower right", title="grey: a link is cut")
    axes[-1].set_xlabel("minutes")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=Path("output"))
    parser.add_argument("--seed", type=int, default=1, help="of what happens to links")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(_HOSTS) as cluster:
        soak = Soak(cluster, Path(folder), chosen.seed)
        soak.train(chosen.hours * 3600)
        count = soak.end()
    grown = {name: growth(samples) for name, samples in soak.samples.items()}
    cuts = sum(event["what"] == "cut" for event in soak.events)
    numbers = {
        "hours": chosen.hours, "rounds": count, "cuts": cuts,
        "rates": len(soak.events) - cuts, "grown": grown, "events": soak.events,
        "samples": soak.samples,
    }  # fmt: skip
    save(chosen.output, "soak", numbers, draw(soak.samples, soak.events))
    too_much = [
        f"{what} of the {name} by {value['grown']:.1%}"
        for name, values in grown.items()
        for what, value in values.items()
        if value["grown"] > _MAY_GROW[what]
    ]
    print(f"{count} rounds, {cuts} cuts, {numbers['rates']} changes of a rate; weights are exact")
    if too_much:
        sys.exit("too much has grown: " + "; ".join(too_much))


if __name__ == "__main__":
    main()
