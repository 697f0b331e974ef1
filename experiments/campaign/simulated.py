"""Simulated iterations beside measured ones: computed once, and kept with a figure's records."""

from __future__ import annotations

import hashlib
import inspect
import statistics

from experiments.campaign.records import Records
from experiments.models import builders, load
from p3kv.frontends.mxnet import layers
from p3kv.report.forecast import bound, model, simulator
from p3kv.report.forecast.simulator import Policy

_ITERATIONS = 5
_WARM_UP = 2


class Simulated:
    """Simulates undilated models, unless `records` have it from the same sources."""

    def __init__(self, records: Records) -> None:
        self._records = records
        sources = (bound, layers, model, builders, simulator)
        text = "".join(inspect.getsource(module) for module in sources)
        self._source = hashlib.sha256(text.encode()).hexdigest()[:12]

    def iteration_s(self, model: str, policy: Policy, hosts: int, link_bit_s: float) -> float:
        """The median iteration; some seconds of computing for hundreds of hosts."""
        identity = {
            "model": model,
            "policy": policy._asdict(),
            "hosts": hosts,
            "link_bit_s": round(link_bit_s),
            "source": self._source,
        }
        for known in self._records.simulated:
            if {**known, "iteration_s": None} == {**identity, "iteration_s": None}:
                return known["iteration_s"]
        times = simulator.simulate(
            load(model).workload, policy, hosts, link_bit_s, iterations=_ITERATIONS
        ).iteration_s
        seconds = statistics.median(times[_WARM_UP:])
        self._records.add_simulated({**identity, "iteration_s": seconds})
        return seconds
