"""Fields of headers: the numbers that each kind of data frame has, in their order.

`p3kv.wire.header` says which kind has which header, and how numbers are packed. Those that are not
given are 0, and weights 1. Flags are here if one header alone has them.
"""

from __future__ import annotations

import msgspec


class Header(msgspec.Struct, frozen=True, gc=False):
    """The numbers that all frames have, and most kinds no others."""

    kind: int
    rank: int
    """The sender's."""
    flags: int = 0
    payload_bytes: int = 0
    """Known when the frame begins to leave, as the next."""
    received: int = 0
    """How many bytes the sender has received since the connection was welcome, on all its links."""


class HelloHeader(Header, frozen=True):
    """Header of HELLO."""

    magic: int = 0
    version: int = 0
    """Version of the protocol."""


class StepHeader(Header, frozen=True):
    """Header of CLIPPED, STEP_PUSHED, SQUARES and OPEN."""

    step: int = 0


class OptimizerHeader(Header, frozen=True):
    """Header of OPTIMIZER."""

    store: int = 0
    from_step: int = 0
    """The step from which on the settings hold."""
    oldest_step: int = 0
    """The oldest step that still needs settings."""


class NormHeader(Header, frozen=True):
    """Header of NORM and VOTE."""

    store: int = 0
    number: int = 0
    """Number among the steps that the store has clipped, from 1."""


class ScaleHeader(NormHeader, frozen=True):
    """Header of SCALE."""

    step: int = 0


class StoreHeader(Header, frozen=True):
    """Header of FORGET."""

    store: int = 0


class SliceSizesHeader(Header, frozen=True):
    """Header of SLICE_SIZES."""

    from_round: int = 0


class KeyHeader(Header, frozen=True):
    """Header of MEMORY."""

    key: int = 0


class RoundHeader(KeyHeader, frozen=True):
    """Header of STATE_BYTES and LOADED."""

    round: int = 0


class StateHeader(RoundHeader, frozen=True):
    """Header of STATES and STATE."""

    WHOLE_TENSOR = 4
    """Flag: the optimizer needs whole tensors, and has one state for the key."""
    MEAN = 8
    """Flag of STATES: a worker asks for the mean gradient of the round, and not for the state."""
    BEFORE = 16
    """Flag of STATES: for the state before the round."""
    member: int = 0
    """Of a bucket: the number of the tensor whose state it is, from 1."""


class EndedHeader(RoundHeader, frozen=True):
    """Header of ENDED."""

    step: int = 0


class SummandHeader(RoundHeader, frozen=True):
    """Header of SUMMAND."""

    slice: int = 0
    """Of a key of rows, the number of its server's run among the key's."""
    rows: int = 0
    """How many rows a key of rows has there."""
    lacking: int = 0
    """As in PUSH."""
    weight: float = 1.0
    """As in PUSH."""


class ValueHeader(RoundHeader, frozen=True):
    """Header of VALUE."""

    slice: int = 0
    ready_us: int = 0
    """When the last gradient of the round was ready, on the clock of the host (`clock_us`)."""
    worked_us: int = 0
    """Time that the server has worked, as it has said."""
    SUM_AS_BEFORE = 8
    """Flag, with NO_GRADIENT: the value is a sum, and is not in the memory."""


class TransferHeader(RoundHeader, frozen=True):
    """The numbers of all frames that carry gradients and values, or ask for them."""

    priority: int = 0


class QueuedHeader(TransferHeader, frozen=True):
    """The numbers of those that wait in a server's queue, by step and priority."""

    step: int = 0
    """Step of the worker's store."""


class PushHeader(QueuedHeader, frozen=True):
    """Header of PUSH."""

    slice: int = 0
    ready_us: int = 0
    """When the gradient was ready, on the worker's own clock (`clock_us`)."""
    workers: int = 0
    """Number of the host's workers whose sum the payload is, with CARRIES."""
    lacking: int = 0
    """Of a bucket: the tensors of which the payload has no gradient, but zeros; a bit for each."""
    weight: float = 1.0
    """By what the worker's gradient counts in the mean of all. The payload has not been multiplied
    by it, unless it is the sum of a host."""


class PullHeader(QueuedHeader, frozen=True):
    """Header of PULL."""

    request: int = 0
    """The number that the answer has."""


class PushRowsHeader(QueuedHeader, frozen=True):
    """Header of PUSH_ROWS."""

    frames: int = 0
    """How many frames the push has for this server, at least one."""
    workers: int = 0
    """As in PUSH."""
    first: int = 0
    """The number of the frame's first row, of those that the server keeps."""
    rows: int = 0
    """How many rows the frame has."""
    weight: float = 1.0
    """As in PUSH."""


class PullRowsHeader(PullHeader, frozen=True):
    """Header of PULL_ROWS."""

    NAMED = 8
    """Flag: the payload has the numbers of rows, in ascending order."""
    KNOWN = 16
    """Flag, with NAMED: for each row 1 more than the round of which the worker has it follows, so
    that it comes only if it has changed since; or 0."""
    slice: int = 0
    """To a neighbour: of which server, by the number of its run among the key's."""


class SliceValueHeader(TransferHeader, frozen=True):
    """The numbers of those that bring a slice's value from its server."""

    slice: int = 0
    late_us: int = 0
    """How much later than the receiver's own gradient the last one of the round was ready."""
    worked_us: int = 0
    """For how long the server has worked so far (`clock_us`)."""


class UpdatedHeader(SliceValueHeader, frozen=True):
    """Header of UPDATED."""

    step: int = 0
    behind: int = 0
    """Where rounds are each worker's own: how many of the receiver's rounds the value has for which
    it lacks another worker's, the slowest one's."""


class PulledHeader(SliceValueHeader, frozen=True):
    """Header of PULLED; the round is one that has slices of this size."""

    request: int = 0


class RowsHeader(TransferHeader, frozen=True):
    """Header of ROWS; the round is that of the value."""

    request: int = 0
    frames: int = 0
    """How many frames the server's answer has."""
    slice: int = 0
    """From a neighbour, as in PULL_ROWS."""
    first: int = 0
    """As in PUSH_ROWS; of rows that the request names, the place of the first one in it."""
    rows: int = 0
    """As in PUSH_ROWS."""
