"""Policies of simulated stores: how arrays are cut, placed on servers and put in order."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from p3kv import slicing

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


class Message(NamedTuple):
    """A slice or a whole array: what is sent at once. `array` counts them in forward order."""

    layer: int
    array: int
    server: int
    size_bytes: float


def cut(workload: Workload, policy: Policy, servers: int) -> List[Message]:
    """Returns the messages of one iteration in each direction, in forward order."""
    messages: List[Message] = []
    filled_elems = [0] * servers
    arrays = [(layer, *array) for layer, of in enumerate(workload.arrays) for array in of]
    for array, (layer, key, elems) in enumerate(arrays):
        if policy.even_servers and policy.slice_elems is not None:
            at_once_elems = _at_once_elems(elems, policy, servers)
            runs = slicing.balanced_runs(elems, at_once_elems, filled_elems)
            filled_elems = slicing.loads_with(filled_elems, runs)
            for piece in slicing.cut(runs, policy.slice_elems):
                size_bytes = piece.length * FLOAT32_BYTES
                messages.append(Message(layer, array, piece.server, size_bytes))
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
            messages.append(Message(layer, array, server, size * FLOAT32_BYTES))
    return messages


def _at_once_elems(elems: int, policy: Policy, servers: int) -> int:
    """How many elements of an array a server gets before the next one does."""
    assert policy.slice_elems is not None
    if policy.least_part_elems is None or not elems:
        return policy.slice_elems
    part_elems = -(-elems // servers)
    slices = -(-part_elems // policy.slice_elems)
    return min(policy.slice_elems, max(policy.least_part_elems, -(-part_elems // slices)))
