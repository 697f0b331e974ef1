"""How large slices should be: as large as the network carries in a few milliseconds."""

from __future__ import annotations

import math

SIZES_ELEMS = (12_500, 25_000, 50_000, 200_000, 200_000, 400_000)
"""Slice sizes by rate. The first is for the rate at which it takes `_WIRE_S`, each next one for
twice that rate. A rate between 1 and 2.5 Gbit/s means busy hosts on a faster link: they get larger
slices, because fewer slices keep them less busy."""
FEWEST_ELEMS = SIZES_ELEMS[0]
_MANY_SERVERS = 8
_WIRE_S = 0.002
_ELEM_BYTES = 4
_SHARING = 4
"""From so many peers on, connections share the credit, because they share a link."""
CREDIT_BYTES = 96 * 1024
"""The unsent bytes that the kernel may hold for a connection. With much less, a connection whose
bytes wait behind others in a link's queue leaves its own link idle."""
_VALUE_CREDITS = 3
_LEAST_SHARE_BYTES = 8 * 1024


def slice_size_for(rate_bytes_s: float, servers: int) -> int:
    """The elements of a slice for a worker that sends to `servers` servers at this rate in all.

    No slice overtakes one that is being sent, so a slice should take little time. But each slice
    costs processor time, whatever its size, so it should not be smaller than necessary. P3 section
    5.6 found 50,000 elements best on its network; `experiments/figure12.py` measures it here. There
    are only a few sizes, so that measuring again gives the same one.

    A server's link carries each slice to all workers. While it carries one slice more than the
    other servers' links, these are idle. With many hosts this takes long, so slices are smaller.
    """
    steps = round(math.log2(max(rate_bytes_s, 1.0) * _WIRE_S / _ELEM_BYTES / FEWEST_ELEMS))
    of_few = SIZES_ELEMS[min(max(0, steps), len(SIZES_ELEMS) - 1)]
    of_all = _MANY_SERVERS * max(of_few, 2 * FEWEST_ELEMS)
    return min(of_few, of_all // max(_MANY_SERVERS, servers))


def gradient_credit_bytes(slice_size: int, peers: int) -> int:
    """Credit in bytes of each of a worker's connections to `peers` servers.

    Priorities do not apply to bytes that the kernel holds.
    """
    return _shared(max(_least_credit_bytes(slice_size), slice_size * _ELEM_BYTES // 2), peers)


def value_credit_bytes(slice_size: int, peers: int) -> int:
    """Credit in bytes of each of a server's connections to `peers` workers.

    Connections share a link in proportion to their bytes in its queue. A host's new values are more
    urgent than its gradients, which are of later layers. With equal credit, a host that had sent
    its gradients first still had values to send when all other links were idle. With many peers,
    more bytes in the queues cost as much as they gain.
    """
    alone = max(_VALUE_CREDITS * _least_credit_bytes(slice_size), slice_size * _ELEM_BYTES)
    # Shared twice: with more peers it comes closer to the gradients' credit, never below it.
    return max(gradient_credit_bytes(slice_size, peers), _shared(_shared(alone, peers), peers))


def _least_credit_bytes(slice_size: int) -> int:
    """Less for small slices, because links are slow then: bytes wait long in the link's queue, and
    a switch without room for them drops them (incast)."""
    return min(CREDIT_BYTES, max(FEWEST_ELEMS, slice_size) * _ELEM_BYTES)


def _shared(alone_bytes: int, peers: int) -> int:
    """The part that each of `peers` connections gets of the credit of a single one."""
    return max(_LEAST_SHARE_BYTES, alone_bytes * _SHARING // max(_SHARING, peers))
