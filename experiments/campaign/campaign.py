"""Measured figures: runs many points with several systems in turn, and resumes where it stopped.

Repetitions are outermost, then points, then systems: what changes on the machine in the course
of hours meets all systems alike.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, NamedTuple, Optional, Sequence, Set, Tuple, Type

from tqdm import tqdm

from experiments.campaign import machine
from experiments.campaign.job import RunFailed
from experiments.campaign.measure import measure
from experiments.campaign.records import Records
from experiments.campaign.traffic import HostTraffic
from experiments.cluster import Cluster
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from p3kv.report.forecast import bound

DILATION = {
    "resnet50": 1.5,
    "inception_v3": 2.0,
    "vgg19": 0.6,
    "sockeye": 4.5,
    "googlenet": 1.0,
    "resnet110": 1.0,
    "inception_v4": 1.0,
    "gpt2_small": 1.5,
    "three_layers": 1.0,
}
"""How much longer than in `experiments.models` four hosts compute, so that two cores carry them.

Iterations then take 2 to 6 s without a network.
"""

UNLIMITED_SYSTEMS = ("dist_sync", "p3kv")
"""The systems that are also measured without any limit on the links."""

LINK_TOLERANCE = 0.03
_IDENTITY = (
    "model", "system", "hosts", "rate_mbit_s", "dilation", "settings", "congestion_control",
    "warm_up", "iterations", "repetition",
)  # fmt: skip
_ATTEMPTS = 2
_HOST_BYTES = 350_000_000
"""A worker and a server before they hold any array."""
_SERVER_COPIES = 3
"""How often all servers together hold the model's bytes: weights, sums, what arrives."""
_REASON_CHARACTERS = 2000
_ROOT = Path(__file__).parent.parent.parent


class Point(NamedTuple):
    """One place in a figure: all that is stated of its runs but system and repetition.

    `rate_mbit_s` is each link's in each direction, dilated; None is no limit. `settings` are
    environment variables for all processes.
    """

    model: str
    hosts: int
    rate_mbit_s: Optional[float]
    dilation: float
    systems: Tuple[str, ...]
    iterations: int
    settings: Tuple[Tuple[str, str], ...] = ()

    @property
    def compute_s(self) -> float:
        """C, dilated."""
        return load(self.model).compute_s * self.dilation

    @property
    def wire_s(self) -> float:
        """M; 0 without a limit."""
        if self.rate_mbit_s is None:
            return 0.0
        return bound.wire_time_s(load(self.model).size_bytes, self.hosts, self.rate_mbit_s * 1e6)


def point(
    model: str,
    hosts: int,
    ratio: Optional[float],
    dilation: float,
    systems: Sequence[str],
    iterations: int,
    **settings: object,
) -> Point:
    """Returns the point at which M is `ratio` times C; None: without a limit.

    Where iterations are long because the network is slow, fewer are as sure.
    """
    rate_mbit_s = None
    if ratio is not None:
        iterations = min(iterations, max(3, round(iterations / ratio)))
        of = load(model)
        bit_s = bound.link_for_ratio_bit_s(ratio, of.compute_s * dilation, of.size_bytes, hosts)
        rate_mbit_s = round(bit_s / 1e6, 2)
    pairs = tuple(sorted((name, str(value)) for name, value in settings.items()))
    return Point(model, hosts, rate_mbit_s, dilation, tuple(systems), iterations, pairs)


class _Planned(NamedTuple):
    point: Point
    system: str
    repetition: int

    def __str__(self) -> str:
        at = self.point
        rate = "no limit" if at.rate_mbit_s is None else f"{at.rate_mbit_s:g} Mbit/s"
        settings = "".join(f", {name}={value}" for name, value in at.settings)
        return f"{at.model}, {at.hosts} hosts, {rate}, {self.system}{settings}"


class Campaign:
    """Measures points into `records`, while entered: the clusters that it makes live as long.

    With `traffic` each run's record also has what went in and out of the first host, as
    `experiments.campaign.traffic.HostTraffic` tells it; no point may be without a limit then.

    For one thread. Raises what a cluster raises when it can't be made or its links are dead; a run
    that fails is tried once more, then kept with its reasons, and the others go on.
    """

    def __init__(
        self,
        records: Records,
        congestion_control: str = "cubic",
        warm_up: int = 2,
        traffic: bool = False,
    ) -> None:
        self._records = records
        self._traffic = traffic
        self._congestion_control = congestion_control
        self._warm_up = warm_up
        self._open = contextlib.ExitStack()
        self._clusters: Dict[int, Cluster] = {}
        self._checked: Set[Tuple[int, Optional[float]]] = set()
        self._machine: Optional[int] = None

    def __enter__(self) -> Campaign:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._open.close()

    def measure(self, points: Sequence[Point], repetitions: int, retry: bool = False) -> None:
        """Measures what is not in the records yet; with `retry` also what has failed before."""
        planned = [
            _Planned(at, system, repetition)
            for repetition in range(repetitions)
            for at in points
            for system in at.systems
        ]
        if retry:
            wanted = {self._name(run) for run in planned}
            failed = [run for run in self._records.runs if "iteration_s" not in run]
            self._records.drop_runs([run for run in failed if _name(run) in wanted])
        done = {_name(run) for run in self._records.runs}
        todo = [run for run in planned if self._name(run) not in done]
        if len(todo) < len(planned):
            tqdm.write(f"{len(planned) - len(todo)} of {len(planned)} runs are there already")
        if not todo:
            return
        if self._machine is None:
            self._machine = self._records.begin(machine.describe(self._congestion_control))
            if len(self._records.machines) > 1:
                tqdm.write(
                    f"note: runs in {self._records.path.name} are of several commits or machines;"
                    " move the file away to measure all anew"
                )
        expected_s = [_expected_s(run.point, self._warm_up) for run in todo]
        # Weighted by what each run is expected to take: the slowest takes ten times the fastest.
        with tqdm(
            total=sum(expected_s),
            smoothing=0,
            bar_format="{percentage:3.0f} %|{bar}| {elapsed}, {remaining} left | {desc}",
        ) as bar:
            for number, (run, seconds) in enumerate(zip(todo, expected_s), 1):
                bar.set_description_str(f"run {number} of {len(todo)}: {run}")
                self._records.add_run(self._measured(run, seconds))
                bar.update(min(seconds, bar.total - bar.n))

    def _measured(self, run: _Planned, expected_s: float) -> Dict[str, Any]:
        """Runs it, twice if need be, and returns its record."""
        record = {**self._identity(run), "machine": self._machine}
        problem = _lacks_memory(run)
        if problem is not None:
            tqdm.write(f"not measured: {run}: {problem}")
            return {**record, "failures": [problem]}
        cluster = self._cluster(run.point)
        failures = []
        settings: Dict[str, Any] = dict(run.point.settings)
        for _ in range(_ATTEMPTS):
            began_s = time.monotonic()
            traffic = HostTraffic(cluster) if self._traffic else None
            try:
                result = measure(
                    cluster,
                    run.system,
                    run.point.model,
                    dilation=run.point.dilation,
                    warm_up=self._warm_up,
                    iterations=run.point.iterations,
                    timeout_s=120 + 3 * expected_s,
                    during=traffic,
                    **settings,
                )
            except RunFailed as error:
                failures.append(_shortened(str(error)))
                tqdm.write(f"failed: {run}: {failures[-1]}")
                continue
            record.update(
                compute_s=result.compute_s,
                iteration_s=[round(seconds, 6) for seconds in result.iteration_s],
                total_s=round(result.total_s, 6),
                cpu_s=round(result.cpu_s, 2),
                worker_rss_kib=result.worker_rss_kib,
                took_s=round(time.monotonic() - began_s, 1),
                **({"versions": result.versions} if result.versions else {}),
                **(traffic.record() if traffic is not None else {}),
            )
            break
        return {**record, "failures": failures} if failures else record

    def _cluster(self, at: Point) -> Cluster:
        """The cluster of the point's hosts at its rate, with links that were checked."""
        cluster = self._clusters.get(at.hosts)
        if cluster is None:
            cluster = Cluster(at.hosts, congestion_control=self._congestion_control)
            self._clusters[at.hosts] = self._open.enter_context(cluster)
        if cluster.hosts[0].rate_mbit_s != at.rate_mbit_s:
            cluster.set_rate(at.rate_mbit_s)
        if (at.hosts, at.rate_mbit_s) not in self._checked:
            self._check_links(cluster, at)
            self._checked.add((at.hosts, at.rate_mbit_s))
        return cluster

    def _check_links(self, cluster: Cluster, at: Point) -> None:
        """Measures each link's goodput; a busy machine may spoil a first attempt."""
        attempts = 0
        flagged = True
        while flagged and attempts < _ATTEMPTS:
            attempts += 1
            links = cluster.goodput()
            off = [
                abs(link.mbit_s / link.expected_mbit_s - 1)
                for link in links
                if link.expected_mbit_s is not None
            ]
            flagged = max(off, default=0.0) > LINK_TOLERANCE
        self._records.add_links(
            {
                "hosts": at.hosts,
                "rate_mbit_s": at.rate_mbit_s,
                "congestion_control": self._congestion_control,
                "expected_mbit_s": links[0].expected_mbit_s if links else None,
                "mbit_s": [round(link.mbit_s, 2) for link in links],
                "attempts": attempts,
                "most_off": round(max(off), 4) if off else None,
                "flagged": flagged,
            }
        )
        if flagged:
            tqdm.write(
                f"flagged: with {at.hosts} hosts at {at.rate_mbit_s:g} Mbit/s a link is"
                f" {max(off):.1%} off what it should carry"
            )

    def _identity(self, run: _Planned) -> Dict[str, Any]:
        return {
            "model": run.point.model,
            "system": run.system,
            "hosts": run.point.hosts,
            "rate_mbit_s": run.point.rate_mbit_s,
            "dilation": run.point.dilation,
            "settings": dict(run.point.settings),
            "congestion_control": self._congestion_control,
            "warm_up": self._warm_up,
            "iterations": run.point.iterations,
            "repetition": run.repetition,
        }

    def _name(self, run: _Planned) -> str:
        return _name(self._identity(run))


def _name(record: Dict[str, Any]) -> str:
    """What tells a run from every other."""
    return json.dumps([record[field] for field in _IDENTITY], sort_keys=True)


def _expected_s(at: Point, warm_up: int) -> float:
    """How long a run will take: start of all processes, first weights, iterations."""
    start_s = 3.0 + 2.0 * at.hosts + at.wire_s
    iteration_s = at.compute_s
    if at.rate_mbit_s is not None:
        of = load(at.model)
        forward_s = [seconds * at.dilation for seconds in of.forward_s]
        backward_s = [seconds * at.dilation for seconds in of.backward_s]
        iteration_s = bound.ideal_fifo_s(
            of.layer_bytes, forward_s, backward_s, at.hosts, at.rate_mbit_s * 1e6
        )
    return start_s + (warm_up + at.iterations) * iteration_s


def _lacks_memory(run: _Planned) -> Optional[str]:
    """Says so when the run's processes would not fit: the kernel would kill some other one."""
    copies = run.point.hosts * SYSTEMS[run.system].worker_copies + _SERVER_COPIES
    need = run.point.hosts * _HOST_BYTES + copies * load(run.point.model).size_bytes
    have = machine.available_bytes()
    if need <= have:
        return None
    return f"needs about {need / 1e9:.0f} GB of memory, of which {have / 1e9:.0f} GB are free"


def _shortened(reason: str) -> str:
    """The end of what a failed run said, which says most, and nothing of where things are."""
    reason = reason.replace(str(_ROOT), ".").replace(sys.prefix, "(python)")
    cut = len(reason) - _REASON_CHARACTERS
    return reason if cut <= 0 else f"... {reason[cut:]}"


def expected_s(points: Sequence[Point], repetitions: int, warm_up: int) -> float:
    """How long all of `points` will take, measured from nothing."""
    return repetitions * sum(_expected_s(at, warm_up) * len(at.systems) for at in points)
