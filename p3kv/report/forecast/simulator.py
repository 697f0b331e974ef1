"""An event-driven simulation of data-parallel training over parameter servers.

n workers compute layer by layer; gradients travel to servers in messages, are summed, updated
and sent back; a layer's next forward pass starts when all of its parameters are back.
Hosts have one full-duplex link: a message occupies its sender's uplink and, at the same time or
later if it is busy, its receiver's downlink, each for its size at the link's rate. The switch
between them has all the memory it needs. There are no losses, no cost for each message, and no
latency but the one stated for the baseline's pulls: what is left is the schedule.

Times are in seconds, sizes in bytes, layers in forward order.
"""

from __future__ import annotations

import heapq
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3kv import slicing
from p3kv.report.forecast.bound import TCP_PAYLOAD, payload_bytes_s

FLOAT32_BYTES = 4


class Policy(NamedTuple):
    """How gradients are cut, ordered and answered.

    `slice_elems`: the largest message. None sends whole arrays, of which those of more than
    `split_elems` are split evenly over all servers, as frameworks do over ps-lite.
    `priority`: the earliest layer first, in both directions and at the server; else first in,
    first out.
    `oldest_round_first`: among priorities, what belongs to an earlier iteration goes before
    everything of a later one. The paper ranks by layer alone. Then a worker that lags behind
    starves: the last layers that it still waits for have the lowest priority of all, and the
    others, an iteration ahead, fill the links with early layers that nobody can use before the
    one behind has caught up.
    `even_servers`: each slice goes to the server that has the fewest bytes so far, as in p3kv. The
    paper's go round robin, which counts one of a bias like a full one.
    `least_part_elems`: with even servers, each keeps an equal part of every array, where such a
    part has at least so many elements. A server's link carries a slice from all workers and to
    all workers, and with many hosts that takes long while the links of servers without one are
    idle. None: servers keep full slices.
    `next_slice_first`: of the slices of one layer, each worker first pushes another one. Else all
    begin with the same server, whose link is then busy while the others' are idle.
    `pulls`: an update is sent only when all of its array is updated and the worker, told so,
    has asked for it (what P3 section 4.2 removes); else each message is answered at once.
    """

    slice_elems: Optional[int]
    priority: bool
    pulls: bool
    oldest_round_first: bool = False
    even_servers: bool = False
    least_part_elems: Optional[int] = None
    next_slice_first: bool = False
    split_elems: int = 1_000_000


# The three systems of the paper's figure 7, and this project's. The baseline is the framework's
# synchronous store, `dist_sync`.
BASELINE = Policy(slice_elems=None, priority=False, pulls=True)
SLICING = Policy(slice_elems=50_000, priority=False, pulls=False)
P3 = Policy(slice_elems=50_000, priority=True, pulls=False)
P3KV = P3._replace(oldest_round_first=True, even_servers=True)
EQUAL_PARTS = P3KV._replace(least_part_elems=1024, next_slice_first=True)
"""Policy that p3kv could have on hundreds of hosts."""


class Workload(NamedTuple):
    """Model that is trained: by layer in forward order, its arrays as (key, elements), and its
    forward and backward time in seconds.

    Elements are of float32: an array of another dtype counts as so many as have its bytes. Keys
    matter to the placement of whole arrays only.
    """

    arrays: Sequence[Sequence[Tuple[int, int]]]
    forward_s: Sequence[float]
    backward_s: Sequence[float]

    @property
    def layer_bytes(self) -> List[int]:
        """Bytes that a worker pushes for each layer in one iteration."""
        return [FLOAT32_BYTES * sum(elems for _, elems in layer) for layer in self.arrays]

    @property
    def compute_s(self) -> float:
        """C: one iteration's forward and backward pass."""
        return sum(self.forward_s) + sum(self.backward_s)


class SimulatedMessage(NamedTuple):
    """A slice or a whole array: what is sent at once. `array` counts them in forward order."""

    layer: int
    array: int
    server: int
    size_bytes: float


def cut(workload: Workload, policy: Policy, servers: int) -> List[SimulatedMessage]:
    """Returns the messages of one iteration in each direction, in forward order."""
    messages: List[SimulatedMessage] = []
    filled_elems = [0] * servers
    arrays = [(layer, *array) for layer, of in enumerate(workload.arrays) for array in of]
    for array, (layer, key, elems) in enumerate(arrays):
        if policy.even_servers and policy.slice_elems is not None:
            at_once_elems = _at_once_elems(elems, policy, servers)
            runs = slicing.balanced_runs(elems, at_once_elems, filled_elems)
            filled_elems = slicing.loads_with(filled_elems, runs)
            for piece in slicing.cut(runs, policy.slice_elems):
                size_bytes = piece.length * FLOAT32_BYTES
                messages.append(SimulatedMessage(layer, array, piece.server, size_bytes))
            continue
        # As the framework's own store places whole arrays: kvstore_dist.h, EncodeDefaultKey.
        sizes: List[float] = [elems]
        first = key * 9973
        if policy.slice_elems is not None:
            sizes = [policy.slice_elems] * (elems // policy.slice_elems)
            if elems % policy.slice_elems:
                sizes.append(elems % policy.slice_elems)
            first = len(messages)  # round robin goes on from array to array
        elif elems > policy.split_elems:
            sizes = [elems / servers] * servers
            first = 0
        for index, size in enumerate(sizes):
            server = (first + index) % servers
            messages.append(SimulatedMessage(layer, array, server, size * FLOAT32_BYTES))
    return messages


def _at_once_elems(elems: int, policy: Policy, servers: int) -> int:
    """How many elements of an array a server gets before the next one does."""
    assert policy.slice_elems is not None
    if policy.least_part_elems is None or not elems:
        return policy.slice_elems
    part_elems = -(-elems // servers)
    slices = -(-part_elems // policy.slice_elems)
    return min(policy.slice_elems, max(policy.least_part_elems, -(-part_elems // slices)))


class Event(NamedTuple):
    """Something that occupied one of host 0's resources. `lane` is "compute", "up", "down" or
    "update"; `kind` is "forward", "backward", "push", "broadcast" or "update"."""

    lane: str
    kind: str
    layer: int
    iteration: int
    start_s: float
    end_s: float


class Result(NamedTuple):
    """Measurements of a simulation.

    `iteration_s`: worker 0's times from one end of a backward pass to the next. The first, which
    finds its parameters there, is C. `timeline`: what host 0 did, by end, if it was asked for.
    """

    iteration_s: List[float]
    timeline: List[Event]


def simulate(
    workload: Workload,
    policy: Policy,
    hosts: int,
    link_bit_s: float,
    iterations: int = 5,
    payload: float = TCP_PAYLOAD,
    dedicated_servers: bool = False,
    symmetric: bool = False,
    update_s_per_byte: float = 0.0,
    pull_s: float = 0.0,
    timeline: bool = False,
) -> Result:
    """Simulates `iterations` of training on `hosts` workers and as many servers.

    Each host runs a worker and a server, whose messages to each other never touch the link; with
    `dedicated_servers`, servers have links of their own. `pull_s` is the time between the update
    of an array and the request for it, for policies that pull.

    `symmetric` takes one host for all: it sends (n-1)/n of each message, as a host does on
    average, and receives when it sends. That is a well-balanced cluster without incast, exact in
    the limit of small messages, and costs the same for any number of hosts; without it, 256
    hosts take a second or more for each iteration.
    """
    if symmetric and dedicated_servers:
        raise ValueError("symmetric is for hosts that run a worker and a server each")
    simulation = _Simulation(
        workload,
        policy,
        iterations,
        payload_bytes_s(link_bit_s, payload),
        simulated=1 if symmetric else hosts,
        share=(hosts - 1) / hosts if symmetric else 1.0,
        dedicated_servers=dedicated_servers,
        local=not (symmetric or dedicated_servers),
        update_s_per_byte=update_s_per_byte / hosts if symmetric else update_s_per_byte,
        pull_s=pull_s,
        timeline=timeline,
    )
    return simulation.run()


_BROADCAST, _PUSH = 0, 1  # in this order at equal priority: a broadcast lets somebody compute
_KINDS = ("broadcast", "push")


class _Worker:
    """One worker's place in its iteration, and how many messages each layer still waits for."""

    __slots__ = ("computing", "ends_s", "missing", "node", "step")

    def __init__(self, node: int, layers: int) -> None:
        self.node = node
        self.step = 0
        self.computing = False
        self.missing = [0] * layers
        self.ends_s: List[float] = []


class _Job(NamedTuple):
    """One message under way; `worker` sends the push or receives the broadcast."""

    kind: int
    message: int
    iteration: int
    worker: _Worker


class _Station:
    """A resource that serves one job at a time, lowest rank first: an uplink or a server."""

    __slots__ = ("busy", "queue", "serve")

    def __init__(self, serve: Callable[[float, _Station, _Job], None]) -> None:
        self.busy = False
        self.queue: List[Tuple[Tuple[int, ...], int, _Job]] = []
        self.serve = serve


class _Simulation:
    """The state of one simulation. Nodes are links: node i is worker i's, and its server's too
    unless servers are dedicated."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        iterations: int,
        rate_bytes_s: float,
        simulated: int,
        share: float,
        dedicated_servers: bool,
        local: bool,
        update_s_per_byte: float,
        pull_s: float,
        timeline: bool,
    ) -> None:
        self._workload = workload
        self._policy = policy
        self._iterations = iterations
        self._seconds_per_byte = share / rate_bytes_s
        self._local = local
        self._update_s_per_byte = update_s_per_byte
        self._pull_s = pull_s
        self._timeline: Optional[List[Event]] = [] if timeline else None
        self._messages: List[SimulatedMessage] = cut(workload, policy, simulated)
        self._of_layer: List[List[int]] = [[] for _ in workload.arrays]
        self._of_array: Dict[int, List[int]] = {}
        for index, message in enumerate(self._messages):
            self._of_layer[message.layer].append(index)
            self._of_array.setdefault(message.array, []).append(index)
        self._workers = [_Worker(node, len(workload.arrays)) for node in range(simulated)]
        self._server_node = [
            server + simulated if dedicated_servers else server for server in range(simulated)
        ]
        nodes = max(self._server_node) + 1
        self._up = [_Station(self._send) for _ in range(nodes)]
        self._down_free_s = [0.0] * nodes
        self._servers = [_Station(self._update) for _ in range(simulated)]
        self._push_counts = [0] * len(self._messages)
        self._updated = dict.fromkeys(self._of_array, 0)
        self._heap: List[Tuple[float, int, Callable[..., None], Tuple[Any, ...]]] = []
        self._sequence = 0
        self._touched: List[_Station] = []

    def run(self) -> Result:
        for worker in self._workers:
            self._advance(0.0, worker)
        heap = self._heap
        while heap:
            now_s = heap[0][0]
            while heap and heap[0][0] == now_s:
                _, _, handle, arguments = heapq.heappop(heap)
                handle(now_s, *arguments)
            # Only now, so that all that became ready at one instant competes.
            touched, self._touched = self._touched, []
            for station in touched:
                if not station.busy and station.queue:
                    station.busy = True
                    station.serve(now_s, station, heapq.heappop(station.queue)[2])
        ends_s = self._workers[0].ends_s
        iteration_s = [end - begin for begin, end in zip([0.0, *ends_s], ends_s)]
        timeline = sorted(self._timeline or [], key=lambda event: (event.end_s, event.start_s))
        return Result(iteration_s, timeline)

    def _at(self, time_s: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, handle, arguments))

    def _enqueue(self, station: _Station, job: _Job) -> None:
        rank: Tuple[int, ...] = ()
        if self._policy.priority:
            layer = self._messages[job.message].layer
            rank = (layer, job.kind, self._turn(job, self._of_layer[layer]))
            if self._policy.oldest_round_first:
                rank = (job.iteration, *rank)
        self._sequence += 1  # the arrival decides among equals
        heapq.heappush(station.queue, (rank, self._sequence, job))
        self._touched.append(station)

    def _turn(self, job: _Job, of_layer: Sequence[int]) -> int:
        """The job's place among those of its layer."""
        if job.kind == _BROADCAST or not self._policy.next_slice_first:
            return job.message
        first = job.worker.node * len(of_layer) // len(self._workers)
        return (job.message - of_layer[0] - first) % len(of_layer)

    def _free(self, now_s: float, station: _Station) -> None:
        station.busy = False
        self._touched.append(station)

    def _record(
        self, lane: str, kind: str, layer: int, iteration: int, start_s: float, end_s: float
    ) -> None:
        if self._timeline is not None:
            self._timeline.append(Event(lane, kind, layer, iteration, start_s, end_s))

    # Computation

    def _advance(self, now_s: float, worker: _Worker) -> None:
        """Starts the worker's next pass if its parameters are there."""
        layers = len(self._workload.arrays)
        iteration, step = divmod(worker.step, 2 * layers)
        if worker.computing or iteration == self._iterations:
            return
        forward = step < layers
        layer = step if forward else 2 * layers - 1 - step
        if forward and worker.missing[layer]:
            return
        worker.computing = True
        seconds = (self._workload.forward_s if forward else self._workload.backward_s)[layer]
        if worker.node == 0:
            kind = "forward" if forward else "backward"
            self._record("compute", kind, layer, iteration, now_s, now_s + seconds)
        self._at(now_s + seconds, self._computed, worker, layer, iteration, forward)

    def _computed(
        self, now_s: float, worker: _Worker, layer: int, iteration: int, forward: bool
    ) -> None:
        worker.computing = False
        worker.step += 1
        if not forward:
            indices = self._of_layer[layer]
            worker.missing[layer] = len(indices)
            for index in indices:
                job = _Job(_PUSH, index, iteration, worker)
                if self._is_local(job):
                    self._push_arrives(now_s, job)
                else:
                    self._enqueue(self._up[worker.node], job)
            if layer == 0:
                worker.ends_s.append(now_s)
        self._advance(now_s, worker)

    # The network

    def _is_local(self, job: _Job) -> bool:
        server = self._messages[job.message].server
        return self._local and self._server_node[server] == job.worker.node

    def _send(self, now_s: float, uplink: _Station, job: _Job) -> None:
        message = self._messages[job.message]
        ends = (job.worker.node, self._server_node[message.server])
        sender, receiver = ends if job.kind == _PUSH else ends[::-1]
        seconds = message.size_bytes * self._seconds_per_byte
        start_s = max(now_s, self._down_free_s[receiver])
        self._down_free_s[receiver] = start_s + seconds
        for lane, node, begin_s in (("up", sender, now_s), ("down", receiver, start_s)):
            if node == 0:
                self._record(
                    lane, _KINDS[job.kind], message.layer, job.iteration, begin_s, begin_s + seconds
                )
        self._at(now_s + seconds, self._free, uplink)
        arrives = self._push_arrives if job.kind == _PUSH else self._broadcast_arrives
        self._at(start_s + seconds, arrives, job)

    def _broadcast_arrives(self, now_s: float, job: _Job) -> None:
        worker, layer = job.worker, self._messages[job.message].layer
        worker.missing[layer] -= 1
        if not worker.missing[layer]:
            self._advance(now_s, worker)

    # Servers

    def _push_arrives(self, now_s: float, job: _Job) -> None:
        # No worker pushes again before all have pushed, so a count needs no iteration.
        self._push_counts[job.message] += 1
        if self._push_counts[job.message] < len(self._workers):
            return
        self._push_counts[job.message] = 0
        if self._update_s_per_byte:
            self._enqueue(self._servers[self._messages[job.message].server], job)
        else:
            self._updates(now_s, job)

    def _update(self, now_s: float, server: _Station, job: _Job) -> None:
        message = self._messages[job.message]
        end_s = now_s + message.size_bytes * self._update_s_per_byte
        if message.server == 0:
            self._record("update", "update", message.layer, job.iteration, now_s, end_s)
        self._at(end_s, self._free, server)
        self._at(end_s, self._updates, job)

    def _updates(self, now_s: float, job: _Job) -> None:
        """A message is updated: sends it to all workers, or waits to be asked for its array."""
        if not self._policy.pulls:
            self._broadcast(now_s, [job.message], job.iteration)
            return
        array = self._messages[job.message].array
        self._updated[array] += 1
        if self._updated[array] == len(self._of_array[array]):
            self._updated[array] = 0
            self._at(now_s + self._pull_s, self._broadcast, self._of_array[array], job.iteration)

    def _broadcast(self, now_s: float, indices: Sequence[int], iteration: int) -> None:
        for index in indices:
            server = self._messages[index].server
            # Each server begins with another worker, so that not all send to the same one first.
            for worker in self._workers[server + 1 :] + self._workers[: server + 1]:
                job = _Job(_BROADCAST, index, iteration, worker)
                if self._is_local(job):
                    self._broadcast_arrives(now_s, job)
                else:
                    self._enqueue(self._up[self._server_node[server]], job)
