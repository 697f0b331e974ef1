"""How large slices should be: as large as the network carries in a few milliseconds."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import List

from p3kv.errors import ProtocolError

SIZES_ELEMS = (12_500, 25_000, 50_000, 200_000, 200_000, 400_000)
"""For a rate at which the first takes `_WIRE_S`, and for twice as much each. More than a link of
1 Gbit/s carries and less than one of 2.5 is what busy hosts get out of a faster one: with fewer
slices they are less busy."""
FEWEST_ELEMS = SIZES_ELEMS[0]
_MANY_SERVERS = 8
_WIRE_S = 0.002
_ELEM_BYTES = 4
_SHARING = 4
"""From so many peers on, what may be under way is for all of them together: they share a link."""
CREDIT_BYTES = 96 * 1024
"""With much less, a connection that waits for others in a link's queue leaves its own link idle."""
_VALUE_CREDITS = 3
_LEAST_SHARE_BYTES = 8 * 1024


def slice_size_for(rate_bytes_s: float, servers: int) -> int:
    """The elements of a slice where every worker sends to so many servers, together at this rate.

    A slice that is being sent is not overtaken, so it should take little time; each costs
    processor time, whatever its size, so it should not be smaller than that. P3 section 5.6 found
    50,000 elements best on its network; `experiments/figure12.py` measures it here. Only a few
    sizes: measuring again gives the same one.

    A server's link carries each slice to all workers, and while it carries one more than the
    others' do, they are idle: with many hosts that would be long, so slices are smaller.
    """
    steps = round(math.log2(max(rate_bytes_s, 1.0) * _WIRE_S / _ELEM_BYTES / FEWEST_ELEMS))
    of_few = SIZES_ELEMS[min(max(0, steps), len(SIZES_ELEMS) - 1)]
    of_all = _MANY_SERVERS * max(of_few, 2 * FEWEST_ELEMS)
    return min(of_few, of_all // max(_MANY_SERVERS, servers))


def gradient_credit_bytes(slice_size: int, peers: int) -> int:
    """How much of each connection to `peers` servers a worker's kernel may hold.

    No priority reaches that.
    """
    return _shared(max(_least_credit_bytes(slice_size), slice_size * _ELEM_BYTES // 2), peers)


def value_credit_bytes(slice_size: int, peers: int) -> int:
    """How much of each connection to `peers` workers a server's kernel may hold.

    Connections share a link in proportion to what they have in its queue, and a host's new values
    are more urgent than its gradients, which are of later layers. With equal parts, a host whose
    gradients were gone sooner had values left when all others' links were idle. Of many peers,
    what more there is in the queues costs as much as it gains.
    """
    alone = max(_VALUE_CREDITS * _least_credit_bytes(slice_size), slice_size * _ELEM_BYTES)
    # Shared twice: the more peers, the closer to what gradients get, and never below it.
    return max(gradient_credit_bytes(slice_size, peers), _shared(_shared(alone, peers), peers))


def _least_credit_bytes(slice_size: int) -> int:
    """Less where slices are small, since links are slow: what waits there waits long, and is lost
    where a switch has no room for it."""
    return min(CREDIT_BYTES, max(FEWEST_ELEMS, slice_size) * _ELEM_BYTES)


def _shared(alone_bytes: int, peers: int) -> int:
    """What each of `peers` connections gets of what one of a few would have."""
    return max(_LEAST_SHARE_BYTES, alone_bytes * _SHARING // max(_SHARING, peers))


class SliceSizes:
    """How large slices are in every round: the same on all workers and servers.

    A generation is a run of rounds in which the size does not change; they count from 0.
    """

    def __init__(self) -> None:
        self._from_rounds: List[int] = []
        self._sizes: List[int] = []
        self._newest_from: float = math.inf

    def set(self, from_round: int, slice_size: int) -> bool:
        """Has slices be of this size from a round on; False if that is known.

        Raises ProtocolError when it contradicts what was said before.
        """
        if self._from_rounds and from_round <= self._from_rounds[-1]:
            if (from_round, slice_size) in zip(self._from_rounds, self._sizes):
                return False
            raise ProtocolError(
                f"it wants slices of {slice_size} elements from round {from_round} on, where "
                f"{self._sizes[-1]} are agreed on from round {self._from_rounds[-1]} on"
            )
        self._from_rounds.append(from_round)
        self._sizes.append(slice_size)
        self._newest_from = from_round
        return True

    def generation(self, round: int) -> int:
        """The generation of a round; -1 before the first."""
        # Asked for every slice, and nearly always of the last one.
        if round >= self._newest_from:
            return len(self._sizes) - 1
        return bisect_right(self._from_rounds, round) - 1

    def first_round(self, generation: int) -> int:
        """The first round of a generation."""
        return self._from_rounds[generation]

    def last_round(self, generation: int) -> float:
        """The last round of a generation; infinite while no other size is agreed on."""
        if generation + 1 == len(self._from_rounds):
            return math.inf
        return self._from_rounds[generation + 1] - 1

    @property
    def smallest(self) -> int:
        """The smallest size of all generations; ValueError before the first."""
        return min(self._sizes)

    def size(self, generation: int) -> int:
        """The size of a generation's slices."""
        return self._sizes[generation]
