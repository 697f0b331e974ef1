"""How large slices should be: as large as the network carries in a few milliseconds."""

from __future__ import annotations

from typing import Tuple

FEWEST_ELEMS = 3_125
SIZES_ELEMS = {
    0: FEWEST_ELEMS, 3e6: 6_250, 6e6: 12_500, 24e6: 25_000, 47e6: 50_000, 141e6: 200_000,
    566e6: 400_000,
}  # fmt: skip
"""Slice sizes by the bytes a second from which on they are right: a slice takes some 2 to 8 ms. A
rate between 1 and 2.5 Gbit/s means busy hosts on a faster link: they get larger slices, because
fewer slices keep them less busy. On slow links, too, a small model needs some slices: sums come
back when whole slices have been there, and links idle until then."""
_SMALL_ELEMS = 12_500
"""Slices count as large as this for credit, and where many hosts share it."""
_MANY_SERVERS = 8
_LARGE_ELEMS = 200_000
_SLICES_OF_A_STEP = 128
_PATIENCE = 8
_LONGEST_QUEUE_S = 0.09
"""For how long a host's link may be busy with what the others have under way to it, where all wait:
at the rate that workers measure, which is some 60 % of a link that they share with servers."""
_ELEM_BYTES = 4
_SHARING = 4
"""From so many peers on, connections share the credit, because they share a link."""
CREDIT_BYTES = 96 * 1024
"""The unsent bytes that the kernel may hold for a connection. With much less, a connection whose
bytes wait behind others in a link's queue leaves its own link idle."""
_VALUE_CREDITS = 3
LEAST_CREDIT_BYTES = 8 * 1024


def slice_size_for(rate_bytes_s: float, servers: int) -> int:
    """The elements of a slice for a worker that sends to `servers` servers at this rate in all.

    No slice overtakes one that is being sent, so a slice should take little time. But each slice
    costs processor time, whatever its size, so it should not be smaller than necessary. P3 section
    5.6 found 50,000 elements best on its network; `experiments/figure12.py` measures it here. There
    are only a few sizes, so that measuring again gives the same one.

    A server's link carries each slice to all workers. While it carries one slice more than the
    other servers' links, these are idle. With many hosts this takes long, so slices are smaller.
    """
    of_few = max(size for rate, size in SIZES_ELEMS.items() if rate <= rate_bytes_s)
    of_all = _MANY_SERVERS * max(of_few, 2 * _SMALL_ELEMS)
    return min(of_few, of_all // max(_MANY_SERVERS, servers))


def patient_sizes(rate_bytes_s: float, step_elems: int, servers: int) -> Tuple[int, int]:
    """The elements of a slice where all workers wait for the network for much of each step, and the
    elements of slices whose credit is right there. For hosts that are alike only: where a link
    carries gradients in one direction and values in the other, or some are faster, links idle until
    the first slices have come from all workers.

    `rate_bytes_s` and `servers` are those of `slice_size_for`; a step has `step_elems` elements in
    slices. Whatever the size, links are not idle there as long as each step has many slices; what
    is left to save is processor time. With the credit for small slices, links that carry large ones
    would idle. With much more, urgent values would wait too long behind others, and what a slow
    link's queue has no room for would be lost.
    """
    size = slice_size_for(rate_bytes_s, servers)
    large = min(_LARGE_ELEMS, step_elems // _SLICES_OF_A_STEP)
    patient = max(size, large * _MANY_SERVERS // max(_MANY_SERVERS, servers))
    for_credit = min(patient, _PATIENCE * max(size, _SMALL_ELEMS))
    room_bytes = _LONGEST_QUEUE_S * rate_bytes_s
    while for_credit > size and _under_way_bytes(for_credit, servers) > room_bytes:
        for_credit = max(size, for_credit - size // 2)
    return patient, for_credit


def gradient_credit_bytes(slice_size: int, peers: int) -> int:
    """Credit in bytes of each of a worker's connections to `peers` servers. Priorities do not apply
    to bytes that the kernel holds."""
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


def _under_way_bytes(slice_size: int, hosts: int) -> int:
    """Bytes that all other hosts, each a worker and a server, may have under way to one."""
    each_bytes = gradient_credit_bytes(slice_size, hosts) + value_credit_bytes(slice_size, hosts)
    return (hosts - 1) * each_bytes


def _least_credit_bytes(slice_size: int) -> int:
    """Less for small slices, because links are slow then: bytes wait long in the link's queue, and
    a switch without room for them drops them (incast)."""
    return min(CREDIT_BYTES, max(_SMALL_ELEMS, slice_size) * _ELEM_BYTES)


def _shared(alone_bytes: int, peers: int) -> int:
    """The part that each of `peers` connections gets of the credit of a single one."""
    return max(LEAST_CREDIT_BYTES, alone_bytes * _SHARING // max(_SHARING, peers))
