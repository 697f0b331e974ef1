"""Measurements of a comparison's trials, and what follows from them."""

from __future__ import annotations

import statistics
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3kv.config.trials import ALONE, FIFO, NATIVE, P3KV, LayerReady, Report, Trial
from p3kv.report.forecast import FRAMEWORKS_OWN, Forecast, Workload, forecast
from p3kv.report.forecast.bound import TCP_PAYLOAD, wire_time_s
from p3kv.report.forecast.simulator import FLOAT32_BYTES

COMPUTING = "computing alone"
_TITLES = {ALONE: COMPUTING, FIFO: "p3kv, FIFO"}
FEWEST_STEPS = 8
"""A script has to make so many, to measure some after a warm-up."""
_WARM_UP = 3
"""One step of so many."""
_SPREAD = 0.1
"""If gradients are ready within this part of a step, all were ready when they were pushed, and
their times tell nothing of the backward pass."""
_BACKWARD = 2 / 3
"""Part of a step's computation, if nothing tells more: two products in a layer, and one forward."""


class Steps(NamedTuple):
    """How many steps a script makes in a trial."""

    warm_up: int
    measured: int

    @classmethod
    def of(cls, measured: int) -> Steps:
        """For so many measured steps."""
        return cls(max(2, measured // _WARM_UP), measured)

    @classmethod
    def within(cls, count: int) -> Steps:
        """For a script that makes `count` steps and no more."""
        warm_up = max(2, count // (_WARM_UP + 1))
        return cls(warm_up, count - warm_up - 1)

    def trial(self, store: str, front_end: str = "", codecs: Tuple[str, str] = ("", "")) -> Trial:
        """A trial of so many steps."""
        return Trial(store, self.warm_up, self.measured, front_end, codecs)

    def mean_s(self, report: Report) -> float:
        """The time of a step, on one worker."""
        return self._mean(report.times_s)

    def each_s(self, report: Report) -> List[float]:
        """The time of each measured step, on one worker."""
        measured = report.times_s[self.warm_up : self.warm_up + self.measured + 1]
        return [after - before for before, after in zip(measured, measured[1:])]

    def mean_cpu_s(self, report: Report) -> float:
        """The processor time of a step, of one worker's process."""
        return self._mean(report.cpu_s)

    def _mean(self, until_s: Sequence[float]) -> float:
        measured = until_s[self.warm_up : self.warm_up + self.measured + 1]
        return (measured[-1] - measured[0]) / (len(measured) - 1)


class Measured(NamedTuple):
    """Measurements of one store's trials, by round."""

    steps_s: List[float]
    """The time of a step, on the slowest worker."""
    cpu_s: List[float]
    """The processor time of a step, of the worker's process that takes most."""
    trials: List[List[Report]]
    """Reports of the workers in each."""

    def add(self, steps: Steps, reports: List[Report]) -> float:
        """Takes what a trial's workers have told; returns the time of a step in it."""
        self.steps_s.append(max(map(steps.mean_s, reports)))
        self.cpu_s.append(max(map(steps.mean_cpu_s, reports)))
        self.trials.append(reports)
        return self.steps_s[-1]

    @property
    def step_s(self) -> float:
        """The time of a step in the median round."""
        return statistics.median(self.steps_s)

    @property
    def worker_s(self) -> float:
        """The processor time of a step in the median round, of a worker's process."""
        return statistics.median(self.cpu_s)

    @property
    def server_s(self) -> float:
        """For how long a server of p3kv's works in a step, in the median round."""
        return statistics.median(
            max(report.server_s for report in reports) for reports in self.trials
        )

    @property
    def spread(self) -> float:
        """How far the rounds are apart, as a part of the time of a step."""
        return (max(self.steps_s) - min(self.steps_s)) / self.step_s


class Comparison(NamedTuple):
    """All that was measured, by store."""

    workers: int
    measured: Dict[str, Measured]
    """Without the framework's own store if that can't train the script. By title of p3kv with a
    codec."""
    shares_links: bool = False
    """Whether any host has several workers."""

    @property
    def front_end(self) -> str:
        """The script's; empty before the first trial."""
        return next((report.front_end for report in self._ours), "")

    @property
    def own(self) -> str:
        """The name of what the framework has itself; empty before the first trial."""
        return next((report.native for report in self._ours), "")

    def title(self, store: str) -> str:
        """The name of a store for people."""
        if store == NATIVE:
            return self.own
        return _TITLES.get(store, store)

    @property
    def _ours(self) -> Sequence[Report]:
        return [report for reports in self.measured[P3KV].trials for report in reports]

    @property
    def base(self) -> str:
        """The store over which speed-ups are."""
        return NATIVE if NATIVE in self.measured else FIFO

    @property
    def with_codecs(self) -> List[str]:
        """The titles of p3kv with a codec."""
        return [store for store in self.measured if store not in (ALONE, NATIVE, FIFO, P3KV)]

    @property
    def computing_s(self) -> float:
        """Time of a step where nothing is sent."""
        return self.measured[ALONE].step_s

    def waiting(self, store: str) -> float:
        """The part of a step that the same step does not take where nothing is sent."""
        return max(0.0, 1 - self.computing_s / self.measured[store].step_s)

    @property
    def spread(self) -> float:
        """Spread of the store whose rounds are furthest apart."""
        return max(one.spread for one in self.measured.values())

    @property
    def link_bit_s(self) -> Optional[float]:
        """Rate of each host's link in each direction, by p3kv's measurement; None if it was not
        measured."""
        rates = [
            [report.link_bytes_s for report in reports if report.link_bytes_s is not None]
            for store in (P3KV, FIFO)
            for reports in self.measured[store].trials
        ]
        # What disturbs a measurement makes it lower. It was one of bytes of gradients.
        most = max((statistics.median(found) for found in rates if found), default=None)
        return None if most is None else 8 * most / TCP_PAYLOAD

    @property
    def workload(self) -> Workload:
        """The script's layers, as forecasts take them."""
        layers = max((report.layers for report in self._alone), key=len)
        return workload(layers, self.computing_s)

    def codec_s(self, title: str) -> float:
        """How much longer than with exact p3kv a processor is busy in each step with a codec: that
        of the worker or of the server, whichever is more."""
        codec, exact = self.measured[title], self.measured[P3KV]
        return max(0.0, codec.worker_s - exact.worker_s, codec.server_s - exact.server_s)

    def pays_below_bit_s(self, title: str) -> float:
        """The rate of links below which exact arrays take longer to send than a step computes, and
        than a codec's work: above, it gains nothing."""
        longest_s = max(self.computing_s, self.codec_s(title))
        size_bytes = sum(self.workload.layer_bytes)
        return wire_time_s(size_bytes, self.workers, 1.0) / longest_s

    @property
    def sends_all(self) -> bool:
        """Whether a step sends all elements, as forecasts take it."""
        return all(report.sends_all for report in self._alone)

    @property
    def _alone(self) -> List[Report]:
        return [report for reports in self.measured[ALONE].trials for report in reports]

    def forecast(self) -> Optional[Forecast]:
        """Forecast of steps on the network that was measured; None if that is not known."""
        rate = self.link_bit_s
        knows = self.own in FRAMEWORKS_OWN
        if rate is None or not self.sends_all or self.shares_links or not knows:
            return None
        return forecast(self.workload, self.workers, rate)


def workload(layers: Sequence[LayerReady], computing_s: float) -> Workload:
    """Workload by the times at which a worker that computes alone had its gradients ready, and by
    how long its steps take.

    Keys whose gradients are ready last are needed first. A layer's backward pass lasts from when
    the gradient before it is ready; the first one shows no time and is taken for average. What is
    left of the step is the forward pass, and divided like the backward pass. But a forward pass
    does not take longer than the backward pass: what is left then comes before the first layer,
    as reading data does.
    """
    count = len(layers)
    ready_s = [layer.ready_s for layer in layers]
    backward_s = ready_s[-1] * count / max(1, count - 1)
    gaps_s = [after - before for before, after in zip(ready_s, ready_s[1:])]
    by_layer = [backward_s / count, *gaps_s]
    if not _SPREAD * computing_s < backward_s < computing_s:
        backward_s = _BACKWARD * computing_s
        by_layer = [backward_s / count] * count
    forward_s = min(computing_s - backward_s, backward_s)
    other_s = computing_s - backward_s - forward_s
    arrays: List[List[Tuple[int, int]]] = [
        [(layer.key, layer.size_bytes // FLOAT32_BYTES)] for layer in layers
    ]
    by_layer.reverse()
    arrays.reverse()
    share = forward_s / backward_s
    return Workload(
        [[], *arrays], [other_s, *(share * seconds for seconds in by_layer)], [0.0, *by_layer]
    )
