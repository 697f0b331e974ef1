"""Agreement of the workers: their settings, the slice sizes of rounds, and barriers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Dict, Optional, Sequence, Tuple, Union

from p3kv.common.combinations import Feature, has_effect
from p3kv.consistency import make_consistency
from p3kv.errors import ConfigError
from p3kv.scheduler.deadlocks import Deadlocks
from p3kv.scheduler.membership import JobFails, Membership, Node, Replies
from p3kv.slicing import Topology, link_rates, patient_sizes, slice_size_for
from p3kv.wire.messages import (
    Agreed,
    BarrierPassed,
    BarrierReached,
    DeclareKey,
    FirstSliceSize,
    JobSettings,
    Measured,
    NewSliceSizes,
    Ready,
    SliceSizes,
    ToScheduler,
)

TO_BEGIN = "to begin to train"
"""Purpose of the wait before all workers are ready."""
_WORTH_A_CHANGE = 3
"""A size changes only by this factor or more: half or twice the size is as good."""
_MISMEASURED = 1.4
"""A size changes only if it would also with a network this factor faster or slower than measured:
else it could change again and again."""
_LEAST_TOO_LARGE = 2**63
"""An integer with so large an absolute value does not travel."""
_MUCH_WAITING, _LITTLE_WAITING = 0.25, 0.1
"""Parts of a step. Where hosts are alike and each worker waits for more than the first, slices
become large; where one waits for less than the second, the network's rate alone decides."""


class Agreement:
    """Collects each worker's message of a kind, and answers all workers after the last message.
    Each method raises JobFails if the others wait for a worker that has left."""

    def __init__(self, members: Membership, num_servers: int, waits: Deadlocks) -> None:
        self._members = members
        self._waits = waits
        self._num_servers = num_servers
        self._sizes: Optional[SliceSizes] = None
        self._ready: Dict[bytes, JobSettings] = {}
        self._rates_bytes_s: Dict[bytes, float] = {}
        self._waiting: Dict[bytes, float] = {}
        """By worker; the part of steps that is waiting."""
        self._patient = False
        """Whether slices are large."""
        self._flows_bytes_s: Dict[bytes, Tuple[float, ...]] = {}
        """By worker, what it sent to each server when all workers measured for the first time."""
        self._numbers: Dict[bytes, Sequence[Union[int, float]]] = {}
        """By worker, what those that wait at a barrier add to sums."""
        self._lets_workers_leave = False
        self._sums_on_hosts = False
        self._topology: Optional[Topology] = None

    @property
    def slice_sizes(self) -> Optional[SliceSizes]:
        """The newest slice sizes; None until workers agree on the first."""
        return self._sizes

    @property
    def topology(self) -> Topology:
        """Hosts of the job, once the slice size is agreed on, with measured rates of their
        links."""
        if self._topology is None:
            hosts = self._members.hosts(neighbours_as_one=False)
            flows = [
                self._flows_bytes_s[worker.identity]
                for worker in self._members.workers
                if worker.identity in self._flows_bytes_s
            ]
            rates = link_rates(hosts.servers, hosts.workers, flows)
            senders = self._members.hosts(neighbours_as_one=self._sums_on_hosts)
            self._topology = replace(senders, rates=rates)
        return self._topology

    def in_turn(self, node: Node, message: ToScheduler) -> bool:
        """Whether the protocol allows the node to send such a message now."""
        is_ready = node.identity in self._ready
        if node.hello.role != "worker" or isinstance(message, Ready) == is_ready:
            return False
        if isinstance(message, Measured):
            first = node.identity not in self._rates_bytes_s
            whole = len(message.flows_bytes_s) in (0, self._num_servers)
            rates = (message.rate_bytes_s, *message.flows_bytes_s)
            in_range = all(0 <= rate < math.inf for rate in rates) and 0 <= message.waiting <= 1
            return (self._sizes is None) == first and whole and in_range
        return not isinstance(message, DeclareKey) or self._sizes is not None

    def ready(self, node: Node, message: Ready) -> Replies:
        """Take a worker's settings, which all must share."""
        mine = self._ready[node.identity] = message.settings
        workers = self._members.workers
        for other in workers:
            theirs = self._ready.get(other.identity, mine)
            if theirs != mine:
                raise JobFails.at(
                    node,
                    f"it ({node.place()}) has {mine.besides(theirs)}, "
                    f"{other.name()} has {theirs.besides(mine)}",
                    "ConfigError",
                    "Set p3kv.configure or the P3KV_* variables the same on all workers.",
                )
        self._check_encryption(node, mine.encrypt)
        self._waits.enter(node, TO_BEGIN, message.place)
        if len(self._ready) < len(workers):
            self.check_nobody_is_missed()
            return []
        self._waits.passed()
        self._sizes = None if mine.slice_size is None else SliceSizes(mine.slice_size)
        self._lets_workers_leave |= mine.let_workers_leave
        self._waits.workers_may_leave = self._lets_workers_leave
        self._sums_on_hosts = sums_on_hosts(mine, len(workers))
        return [(worker.identity, Agreed()) for worker in workers]

    def measured(self, node: Node, message: Measured, sliced_elems: int) -> Replies:
        """Take a worker's measurement of the network; `sliced_elems` travel in a step, in
        slices."""
        if message.rate_bytes_s or node.identity not in self._rates_bytes_s:
            self._rates_bytes_s[node.identity] = message.rate_bytes_s
        self._waiting[node.identity] = message.waiting
        if message.flows_bytes_s:
            self._flows_bytes_s[node.identity] = message.flows_bytes_s
        workers = self._members.workers
        if len(self._rates_bytes_s) < len(workers):
            self.check_nobody_is_missed()
            return []
        if self._sizes is not None:
            least = min(self._waiting.values())
            enough = _LITTLE_WAITING if self._patient else _MUCH_WAITING
            self._patient = self.topology.is_even and least > enough
        sizes = self._sizes_for(1.0, sliced_elems)
        if self._sizes is None:
            self._sizes = sizes
            return [(worker.identity, FirstSliceSize(sizes.slice_size)) for worker in workers]
        perhaps = [self._sizes_for(off, sliced_elems) for off in (_MISMEASURED, 1 / _MISMEASURED)]
        if not all(_worth_a_change(self._sizes, other) for other in perhaps):
            return []
        if workers[0].gone:
            return []  # it alone could announce other slice sizes
        self._sizes = sizes
        return [(workers[0].identity, NewSliceSizes(sizes))]

    def _sizes_for(self, off: float, sliced_elems: int) -> SliceSizes:
        """The right slice sizes if workers' rates are `off` times those that they measured."""
        # All workers wait for the slowest.
        rate_bytes_s = off * min(self._rates_bytes_s.values())
        if self._patient:
            return SliceSizes(*patient_sizes(rate_bytes_s, sliced_elems, self._num_servers))
        return SliceSizes(slice_size_for(rate_bytes_s, self._num_servers))

    def barrier(self, node: Node, message: BarrierReached) -> Replies:
        """Have a worker wait for all workers, which must do the same there, and sum the numbers
        that they bring."""
        self._waits.enter(node, message.purpose, message.place)
        if message.numbers:
            self._numbers[node.identity] = message.numbers
        for other in self._members.workers:
            if self._waits.purpose(other) not in (None, message.purpose):
                raise JobFails.at(
                    node,
                    f"it ({node.place()}) {self._waits.does(node)}, and {other.name()} "
                    f"{self._waits.does(other)}",
                    "P3Error",
                    "Run the same script with the same files on all workers.",
                )
        return self._after_barrier()

    @property
    def _at_barrier(self) -> bool:
        """Whether a worker waits at one. Before all have begun, they wait for that."""
        return len(self._waits) > 0 and len(self._ready) == len(self._members.workers)

    def let_workers_leave(self) -> None:
        """Have no barrier wait for workers that have left, whatever the settings say."""
        self._lets_workers_leave = self._waits.workers_may_leave = True

    def worker_left(self) -> Replies:
        """Note that a worker has left in order; others may have waited for it at a barrier."""
        if self._at_barrier:
            return self._after_barrier()
        self.check_nobody_is_missed()
        return []

    def _check_encryption(self, worker: Node, encrypts: bool) -> None:
        """Servers are the same as workers in this one setting."""
        for server in self._members.role("server"):
            if server.hello.encrypts != encrypts:
                raise JobFails.at(
                    worker,
                    f"it ({worker.place()}) has encrypt={encrypts}, "
                    f"{server.name()} has encrypt={not encrypts}",
                    "ConfigError",
                    "Set P3KV_ENCRYPT the same in the environment of all workers and servers.",
                )

    def _after_barrier(self) -> Replies:
        """Let those go on that wait at the barrier, if all are there."""
        workers = self._members.workers
        awaited = [one for one in workers if not one.gone or self._needed_at_barrier(one)]
        if len(self._waits) < len(awaited):
            self.check_nobody_is_missed()
            return []
        self._waits.passed()
        passed = BarrierPassed(self._totals())
        return [(worker.identity, passed) for worker in awaited]

    def _totals(self) -> Tuple[Union[int, float], ...]:
        """The sums of the numbers that workers have brought, in the order of ranks."""
        numbers, self._numbers = self._numbers, {}
        workers = sorted(self._members.workers, key=lambda one: one.rank)
        brought = [numbers[one.identity] for one in workers if one.identity in numbers]
        # The built-in sum rounds otherwise since Python 3.12.
        totals = (reduce(add, each) for each in zip(*brought))
        return tuple(one if abs(one) < _LEAST_TOO_LARGE else float(one) for one in totals)

    def _needed_at_barrier(self, worker: Node) -> bool:
        """Whether others wait for a worker at a barrier even if it has left."""
        if not self._lets_workers_leave:
            return self._at_barrier
        # Where a barrier has a purpose, workers do there what worker rank 0 has said; but a sum is
        # of those that are left.
        others = any(map(self._waits.purpose, self._members.workers)) and not self._numbers
        return worker.rank == 0 and others

    def starts_without(self, node: Node) -> bool:
        """Whether other workers have created their stores and wait for this worker's."""
        return node.identity not in self._ready and bool(self._ready)

    def check_nobody_is_missed(self) -> None:
        """Raises JobFails if the others wait for a worker that has left."""
        workers = self._members.workers
        starting = 0 < len(self._ready) < len(workers)
        measuring = self._sizes is None and bool(self._rates_bytes_s)
        for worker in workers:
            waiting = starting or measuring or self._needed_at_barrier(worker)
            if waiting and worker.gone and not (starting and worker.identity in self._ready):
                raise JobFails(self._members.left_early(worker))


def sums_on_hosts(settings: JobSettings, num_workers: int) -> bool:
    """Whether workers of one host sum their gradients before they send them, by the job's rule."""
    try:
        rule = make_consistency(settings.consistency, num_workers)
    except ConfigError:
        return False
    return has_effect(Feature.LOCAL_AGGREGATION, settings.features | rule.features)


def _worth_a_change(one: SliceSizes, other: SliceSizes) -> bool:
    pairs = ((one.slice_size, other.slice_size), (one.size_for_credit, other.size_for_credit))
    return max(max(a / b, b / a) for a, b in pairs) >= _WORTH_A_CHANGE
