"""Traffic of one host over time, from its interface's counters."""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np

from experiments.cluster import Cluster

PERIOD_S = 0.01
"""P3 section 5.1 measures every 10 ms."""

IDLE_SHARE = 0.05
"""Below this share of the link's rate a direction counts as idle."""


class Sample(NamedTuple):
    """What the counters said: `at_ns` is `time.monotonic_ns`, the others are bytes so far."""

    at_ns: int
    received: int
    sent: int


class Traffic(NamedTuple):
    """Mean rates of consecutive periods, in Mbit/s."""

    inbound_mbit_s: List[float]
    outbound_mbit_s: List[float]


class Sampler:
    """Reads counters every `period_s`, while entered, in a thread of its own.

    `read` returns (received, sent) bytes and must be fast and safe to call from that thread.
    Deadlines do not drift, and each sample has its own time, so a late one distorts nothing. May be
    entered once, and left by another thread than the one that entered it.
    """

    def __init__(self, read: Callable[[], Tuple[int, int]], period_s: float = PERIOD_S) -> None:
        self._read = read
        self._period_ns = round(period_s * 1e9)
        self._samples: List[Sample] = []
        self._failure: Optional[BaseException] = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._ending.set()
        self._thread.join()

    def samples(self) -> List[Sample]:
        """What was read while entered; raises what `read` has raised."""
        if self._failure is not None:
            raise self._failure
        return list(self._samples)

    def _run(self) -> None:
        try:
            deadline_ns = time.monotonic_ns()
            while not self._ending.is_set():
                received, sent = self._read()
                now_ns = time.monotonic_ns()
                self._samples.append(Sample(now_ns, received, sent))
                # What is missed is left out: two readings at once say no more than one.
                missed = max(0, now_ns - deadline_ns) // self._period_ns
                deadline_ns += (missed + 1) * self._period_ns
                self._ending.wait((deadline_ns - time.monotonic_ns()) / 1e9)
        except Exception as error:  # noqa: BLE001  raised by `samples`
            self._failure = error


class HostTraffic(Sampler):
    """Traffic of a cluster's first host while it is entered; its link has a limit."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(lambda: cluster.interface_counters(cluster.hosts[0]))
        link_mbit_s = cluster.hosts[0].rate_mbit_s
        assert link_mbit_s is not None, "what is idle is told by what the link could carry"
        self._link_mbit_s = link_mbit_s

    def record(self) -> Dict[str, Any]:
        """Rates of all periods, what of them is idle and used, and how many samples were late.

        Raises what reading the counters has raised, and ValueError for less than one period.
        """
        samples = self.samples()
        found = binned(samples)
        directions = (("in", found.inbound_mbit_s), ("out", found.outbound_mbit_s))
        return {
            "late_samples": round(late_share(samples), 4),
            "idle": {
                way: round(idle_fraction(rates, self._link_mbit_s), 4) for way, rates in directions
            },
            "used": {
                way: round(statistics.mean(rates) / self._link_mbit_s, 4)
                for way, rates in directions
            },
            **found._asdict(),
        }


def binned(samples: Sequence[Sample], period_s: float = PERIOD_S) -> Traffic:
    """Rates in whole periods from the first sample on; counters in between are interpolated.

    Raises ValueError for less than one period.
    """
    times_s = np.array([(sample.at_ns - samples[0].at_ns) / 1e9 for sample in samples])
    # A rounding error must not cost the last period.
    periods = int(times_s[-1] / period_s + 1e-6) if samples else 0
    if periods == 0:
        raise ValueError(f"{len(samples)} samples span less than {period_s} s")
    edges_s = np.arange(periods + 1) * period_s
    rates = []
    for counts in ([s.received for s in samples], [s.sent for s in samples]):
        octets = np.interp(edges_s, times_s, np.array(counts) - counts[0])
        rates.append([round(float(rate), 2) for rate in np.diff(octets) * 8e-6 / period_s])
    return Traffic(*rates)


def late_share(samples: Sequence[Sample], period_s: float = PERIOD_S) -> float:
    """The part of the samples that came more than half a period too late to tell two periods."""
    gaps_s = [(after.at_ns - before.at_ns) / 1e9 for before, after in zip(samples, samples[1:])]
    return sum(gap > 1.5 * period_s for gap in gaps_s) / len(gaps_s) if gaps_s else 0.0


def idle_fraction(
    rates_mbit_s: Sequence[float], link_mbit_s: float, share: float = IDLE_SHARE
) -> float:
    """The part of the periods with less than `share` of what the link could carry."""
    return sum(rate < share * link_mbit_s for rate in rates_mbit_s) / len(rates_mbit_s)
