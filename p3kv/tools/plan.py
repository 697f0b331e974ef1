"""What a job would reach with each store, before anybody has its hosts."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, NamedTuple, Sequence

from p3kv.common.words import counted
from p3kv.report.forecast import DDP, DIST_SYNC, Forecast, Workload, forecast
from p3kv.report.forecast.forecast import MOST_HOSTS_EACH
from p3kv.report.verdict import LITTLE, bit_rate

_FACTORS = (1 / 4, 1 / 2, 1, 2, 4)
_STEPS_OF_A_CURVE = 4
"""For each doubling of the bandwidth."""
_FEWEST_HOSTS = 2


class Store(NamedTuple):
    """A store that is compared: its name, and its time of an iteration in a forecast."""

    name: str
    iteration_s: Callable[[Forecast], float]


def stores(own: str) -> Sequence[Store]:
    """The compared stores in the table's order: the framework's own, one of `FRAMEWORKS_OWN`, p3kv,
    and the bound, which no store exceeds."""
    return (
        Store("DDP at best" if own == DDP else own, lambda found: found.own_s(own)),
        Store("p3kv, FIFO", lambda found: found.fifo_s),
        Store("p3kv", lambda found: found.p3kv_s),
        Store("bound", lambda found: found.bound_s),
    )


class Prediction(NamedTuple):
    """One number of hosts with one bandwidth, in bits a second each way."""

    hosts: int
    link_bit_s: float
    batch_size: int
    forecast: Forecast
    own: str
    """The framework's own store."""

    def samples_s(self, store: Store) -> float:
        """Samples of all hosts in a second."""
        return self.hosts * self.batch_size / store.iteration_s(self.forecast)

    @property
    def computing_samples_s(self) -> float:
        """Samples a second that the hosts would train if they never waited."""
        return self.hosts * self.batch_size / self.forecast.compute_s

    @property
    def takes_dist_sync_as_balanced(self) -> bool:
        """Its arrays are then spread over the servers as evenly as they never are."""
        return self.own == DIST_SYNC and self.hosts > MOST_HOSTS_EACH

    @property
    def own_s(self) -> float:
        """The time of an iteration with what the framework has itself."""
        return self.forecast.own_s(self.own)


class Series(NamedTuple):
    """The network that was asked for, and others around it."""

    workload: Workload
    batch_size: int
    asked: Prediction
    by_hosts: List[Prediction]
    by_bandwidth: List[Prediction]

    def curve(self) -> List[Prediction]:
        """More bandwidths, for a smooth line; some seconds of simulating."""
        least, most = self.by_bandwidth[0].link_bit_s, self.by_bandwidth[-1].link_bit_s
        rates, rate = [], least
        while rate < most * 1.01:
            rates.append(rate)
            rate *= 2 ** (1 / _STEPS_OF_A_CURVE)
        return [
            _prediction(self.workload, self.batch_size, self.asked.hosts, rate, self.asked.own)
            for rate in rates
        ]


def predict(
    workload: Workload, batch_size: int, hosts: int, link_bit_s: float, own: str = DIST_SYNC
) -> Series:
    """Predicts what `hosts` hosts reach, each a worker with batches of `batch_size` and a server
    behind a link of `link_bit_s` in each direction; and a quarter to four times as many, and such
    bandwidths. `own`: what the framework has itself, one of `FRAMEWORKS_OWN`."""

    def at(hosts: int, link_bit_s: float) -> Prediction:
        return _prediction(workload, batch_size, hosts, link_bit_s, own)

    known: Dict[int, Prediction] = {count: at(count, link_bit_s) for count in _around(hosts)}
    rates: Iterable[float] = (link_bit_s * factor for factor in _FACTORS)
    by_bandwidth = [known[hosts] if rate == link_bit_s else at(hosts, rate) for rate in rates]
    return Series(workload, batch_size, known[hosts], list(known.values()), by_bandwidth)


def _around(hosts: int) -> List[int]:
    counts = {max(_FEWEST_HOSTS, round(hosts * factor)) for factor in _FACTORS}
    return sorted(counts)


def _prediction(
    workload: Workload, batch_size: int, hosts: int, link_bit_s: float, own: str
) -> Prediction:
    return Prediction(hosts, link_bit_s, batch_size, forecast(workload, hosts, link_bit_s), own)


_BALANCED = "*"


def table(series: Series) -> List[str]:
    """The lines of the table: samples a second of all hosts, and how much faster p3kv is."""
    names = [store.name for store in stores(series.asked.own)]
    rows = [["", "hosts", "bandwidth", *names, f"p3kv / {series.asked.own}"]]
    rows += [_row(one, series.asked) for one in series.by_hosts]
    rows.append([])
    rows += [_row(one, series.asked) for one in series.by_bandwidth]
    widths = [max(len(row[column]) for row in rows if row) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def _row(one: Prediction, asked: Prediction) -> List[str]:
    cells = [_number(one.samples_s(store)) for store in stores(one.own)]
    if one.takes_dist_sync_as_balanced:
        cells[0] += _BALANCED
    return [
        ">" if one == asked else "", str(one.hosts), bit_rate(one.link_bit_s / 8), *cells,
        f"{one.own_s / one.forecast.p3kv_s:.2f}",
    ]  # fmt: skip


def _number(samples_s: float) -> str:
    return f"{samples_s:.0f}" if samples_s >= 100 else f"{samples_s:#.3g}"


def advice(asked: Prediction) -> str:
    """Whether the network is the limit, what p3kv gains, and what else helps."""
    found = asked.forecast
    own = asked.own
    where = f"On {counted(asked.hosts, 'host')} with {bit_rate(asked.link_bit_s / 8)}"
    waiting = 1 - found.compute_s / asked.own_s
    gain = asked.own_s / found.p3kv_s
    if waiting <= LITTLE:
        return (
            f"{where} the network is not the limit: with {own} {waiting:.1%} of a step is "
            f"waiting for it, and p3kv would be {gain - 1:.1%} faster."
        )
    left = 1 - found.compute_s / found.p3kv_s
    text = (
        f"{where} the network is the limit: with {own} {waiting:.0%} of a step is waiting for "
        f"it. p3kv would train {gain:.2f} times as fast as {own}, "
    )
    if left <= LITTLE:
        return f"{text}and computing would be the limit: {left:.1%} of a step would be waiting."
    return (
        f"{text}and {left:.0%} of a step would still be waiting: only more bandwidth or fewer "
        "bytes (P3KV_GRADIENT_CODEC, larger batches) avoid that."
    )


def caveats(shown: Sequence[Prediction]) -> List[str]:
    """In what these predictions are optimistic."""
    lines = [
        "Simulated, and optimistic: processors cost nothing, so faster networks gain less than "
        "this."
    ]
    if any(one.own == DDP for one in shown):
        lines.append(
            "DDP at best: it sends gradients in the order in which they are ready, without buckets "
            "and without a pause, and the next forward pass begins when all have come."
        )
    if any(one.takes_dist_sync_as_balanced for one in shown):
        lines.append(
            f"{_BALANCED} With more than {MOST_HOSTS_EACH} hosts, the load of dist_sync's servers "
            "is taken as balanced. It is not, so dist_sync is slower than this."
        )
    return lines
