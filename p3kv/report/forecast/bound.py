"""The least time that an iteration can take, whatever the store.

n hosts, each with one worker and one server behind one full-duplex link. In one iteration a
host sends (n-1)/n of the model as gradients and as much again as its server's updates, and
receives as much. Layers are in forward order; times are in seconds, rates in bits a second in
each direction.
"""

from __future__ import annotations

from itertools import accumulate
from typing import List, Sequence

# At MTU 1500 a frame of 1514 bytes, which is what `tc tbf` counts, carries 1448 bytes of TCP
# data with timestamps: 0.956. Measured over veth: 0.957.
TCP_PAYLOAD = 0.957


def payload_bytes_s(link_bit_s: float, payload: float = TCP_PAYLOAD) -> float:
    """Bytes of gradients that a link carries in a second, in each direction."""
    return link_bit_s * payload / 8


def wire_time_s(
    size_bytes: float, hosts: int, link_bit_s: float, payload: float = TCP_PAYLOAD
) -> float:
    """M: how long each direction of a host's link is busy for `size_bytes` of the model."""
    return 2 * (hosts - 1) / hosts * size_bytes / payload_bytes_s(link_bit_s, payload)


def link_for_ratio_bit_s(
    ratio: float, compute_s: float, size_bytes: float, hosts: int, payload: float = TCP_PAYLOAD
) -> float:
    """The link rate at which M is `ratio` times C."""
    return wire_time_s(size_bytes, hosts, 1.0, payload) / (ratio * compute_s)


def lower_bound_s(
    layer_bytes: Sequence[float],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hosts: int,
    link_bit_s: float,
    payload: float = TCP_PAYLOAD,
) -> float:
    """T: no schedule has shorter iterations than this.

    Gradients of the layers 0..j are all made after the backward pass of layer j, and needed
    before its next forward pass; on either side of that time the layers from j on are computed.
    """
    after = _from_each_on([f + b for f, b in zip(forward_s, backward_s)])
    wire = _wire_up_to_each(layer_bytes, hosts, link_bit_s, payload)
    return max(after[0], *(m + t for m, t in zip(wire, after)))


def ideal_fifo_s(
    layer_bytes: Sequence[float],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hosts: int,
    link_bit_s: float,
    payload: float = TCP_PAYLOAD,
) -> float:
    """An iteration that sends first in, first out, and overlaps the backward pass perfectly. The
    first layer's gradient is the last to be sent, so no forward pass overlaps anything."""
    after = _from_each_on(backward_s)
    wire = _wire_up_to_each(layer_bytes, hosts, link_bit_s, payload)
    return sum(forward_s) + max(m + t for m, t in zip(wire, after))


def efficiency(compute_s: float, iteration_s: float) -> float:
    """The part of an iteration in which the accelerator works; 1.0 when the network is free."""
    return compute_s / iteration_s


def _from_each_on(seconds: Sequence[float]) -> List[float]:
    """Sums of `seconds` from each layer to the last."""
    return list(accumulate(reversed(seconds)))[::-1]


def _wire_up_to_each(
    layer_bytes: Sequence[float], hosts: int, link_bit_s: float, payload: float
) -> List[float]:
    """M of the layers from the first up to each."""
    return [wire_time_s(size, hosts, link_bit_s, payload) for size in accumulate(layer_bytes)]
