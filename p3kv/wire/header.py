"""The header of a data frame, between a worker and a server.

It is fixed and little-endian; a payload of `payload_bytes` bytes follows: a slice's elements, or
one of the messages (`p3kv.wire.messages`).
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique
from typing import NamedTuple

MAGIC = 0x564B3350
"""'P3KV' in the first four bytes that a little-endian reader finds in a hello's key field."""

MAX_PROBE_BYTES = 64 * 1024
MAX_STATE_BYTES = 256 * 1024
"""Bytes of an optimizer's state in one frame: few, because no slice overtakes it."""
URGENT = 2**31 - 1
"""Priority of frames that carry no slice. They are small, and other frames depend on them."""
LAST = -(2**65)
"""Priority of a server's goodbye: all that is queued goes before it."""

INITIAL_ROUND = 0
"""The round in which worker rank 0 alone gives a key its initial value."""
LAST_ROUND = 2**32 - 1
"""No header can name a later round or step."""


@unique
class Kind(IntEnum):
    """What a data frame is."""

    HELLO = 1
    """First frame of a worker's connection; payload a nonce and a proof (`p3kv.wire.proofs`)."""
    CHALLENGE = 25
    """The server's answer to it; payload a nonce and a proof."""
    PROOF = 26
    """The worker's answer to that; payload a proof, then DataHello."""
    WELCOME = 2
    """A server serves the worker from now on; payload DataWelcome."""
    KEY = 3
    """A worker tells a server about a key, before its first slice; payload DeclaredKey."""
    OPTIMIZER = 4
    """Worker rank 0 sends the optimizer settings of its store number `key`. They hold from `step`
    on; `round` is the oldest step that still needs settings; the front end makes the payload."""
    PUSH = 5
    """A worker's slice for a round of its key, in a step of its store; payload elements."""
    PULL = 6
    """A worker that has pushed for `round` asks for the key's value after it, or a newer one;
    `slice` is the request's number."""
    UPDATED = 7
    """A slice's value after `round`, to the workers that asked for it with their push."""
    PULLED = 8
    """A slice's value, part of the answer to PULL; `step` is the request's number, and `round` one
    that has slices of this size."""
    BYE = 9
    """A worker is done and sends nothing more; the server's answer is its last word, too."""
    ORDER = 10
    """Worker rank 0 sends the forward order, and every server passes it on to all workers before
    the results of the round in which rank 0 has learned it; payload ForwardOrder."""
    PROBE = 11
    """A worker measures the network; the server echoes as many bytes."""
    TERMS = 12
    """What all must agree on from `round` on; payload Terms. Every worker sends the first terms
    before its first slice. When terms change, worker rank 0 sends new ones before its first slice
    of a step, for a later round, and the server passes them on to all workers."""
    OPEN = 13
    """A worker tells the servers on its host that it waits for no values of steps before `step`.
    When all workers on the host have said so, each of these servers tells all workers."""
    ENDED = 14
    """A server tells workers that the key's round has ended on this server, if its result does not
    tell them: they did not ask for one."""
    STALLED = 15
    """A server tells all workers that a round has waited long for a worker; payload Stalled."""
    STATES = 16
    """A worker asks a server for its optimizer's state of a key when `round` has ended."""
    STATE = 17
    """A server's answer to STATES; or worker rank 0 gives a server the state that its optimizer has
    of a key from the end of `round` on. Payload StateOutline."""
    STATE_BYTES = 18
    """The next bytes of the arrays that the last STATE has announced, array by array."""
    LOADED = 19
    """A server's optimizer has the state that worker rank 0 has given."""
    CLIPPED = 20
    """No round of `step` ends before worker rank 0 has sent SCALE: its gradients are clipped by the
    norm of all. Comes before the step's first slice."""
    PUSHED = 21
    """Worker rank 0 has pushed all keys of the clipped step `step`; payload Pushed."""
    SQUARES = 22
    """All gradients of the clipped step `step` that this server gets are summed; payload
    Squares. To worker rank 0 only."""
    SCALE = 23
    """Worker rank 0 has the norm of `step`; payload Scale. The step is number `round` of those that
    store number `key` has clipped."""
    NORM = 24
    """A server tells all workers the norm of the step number `round` that store number `key` has
    clipped; payload Norm."""
    PUSH_ROWS = 27
    """Some of the rows that a worker has touched, for a round of a key of rows; `slice` is how many
    frames this push has for this server, at least one; payload Rows (`p3kv.wire.rows`)."""
    PULL_ROWS = 28
    """A worker that has pushed for `round` asks for rows of the key's value after it, or of a newer
    one: those that it names (NAMED), those that have changed since the round in the payload, or
    without a payload all. `slice` is the request's number."""
    ROWS = 29
    """Some of the rows of an answer to PULL_ROWS; `step` is the request's number, `slice` how many
    frames the server's answer has, `round` that of the value; payload Rows."""
    ACK = 30
    """Only carries `received`, where no other frame would; once a connection is welcome."""
    CHECKPOINT = 31
    """Worker rank 0 asks for a checkpoint, before it pushes for any later round than those that the
    payload names; payload Checkpoint. Server 0 passes it on to workers that write files, too."""
    WRITTEN = 32
    """A server's answer to it, to worker rank 0 only; or a worker's, to server 0, which passes it
    on to worker rank 0. Payload Written."""
    RESUMED = 33
    """Worker rank 0 tells server 0 from which checkpoint the job goes on, and the server passes it
    on to all workers; payload Resumed."""
    MEMORY = 34
    """A worker tells a neighbour, another worker of its host, where the memory of key `key` is that
    it shares; payload SharedMemory. Comes before the frames that speak of it."""
    SUMMAND = 35
    """A worker's slice is in its shared memory, for the neighbour that sends the host's sum; with
    WANTS_RESULT the worker wants the value."""
    VALUE = 36
    """The value of a slice is in the shared memory of the neighbour that says so."""


WANTS_RESULT = 1
"""Flag of PUSH: send a value here as soon as it is new enough for the worker to go on."""
ENCODED = 2
"""Flag of PUSH, UPDATED and PULLED: the key's codec has made the payload. Initial values travel as
they are in memory."""
WHOLE_TENSOR = 4
"""Flag of STATES and STATE: the optimizer needs whole tensors, and has one state for the key."""

NAMED = 8
"""Flag of PULL_ROWS: the payload has the numbers of rows, in ascending order."""

ACKNOWLEDGE = 16
"""Flag of any frame: the sender waits until it knows that the frame has arrived."""

IN_HOST_SUM = 32
"""Flag of PUSH, which has no payload then: the worker's slice is in the sum of its host's workers,
which one of them sends. With WANTS_RESULT, its result comes to that worker."""
CARRIES = 64
"""Flag of PUSH: with IN_HOST_SUM, it is this worker that will send the host's sum of the slice.
Without, the payload is this sum, and the worker's own push was counted before."""
NO_GRADIENT = 128
"""Flag of PUSH, PUSH_ROWS and SUMMAND, which have no payload then: nobody has computed a gradient
on the worker since its last push, and nothing is added. With CARRIES: on none of the host's
workers. Flag of UPDATED, VALUE and ENDED: no worker had a gradient in the round, and the value is
that of the round before. UPDATED has no payload then where the value is a sum."""
SUM_AS_BEFORE = 8
"""Flag of VALUE, with NO_GRADIENT: the value is a sum, and is not in the memory."""


class Header(NamedTuple):
    """The header of a data frame. A tuple, not a dataclass: one is made for every slice."""

    kind: int
    flags: int
    rank: int
    key: int
    slice: int
    round: int
    step: int
    priority: int
    payload_bytes: int
    received: int = 0
    """How many bytes the sender has received since the connection was welcome, on all its links.
    Known when the frame begins to leave."""
    time_us: int = 0
    """Of a worker's push: when its gradient was ready, on the worker's own clock (`clock_us`). Of a
    value: how much later than the receiver's own gradient the last one of its round was ready. Of
    VALUE: when that was, on the clock of the host."""
    worked_us: int = 0
    """Of a server's value: for how long the server has worked so far. Like `time_us` it begins
    again at 0 after 2^32 microseconds."""


_LAYOUT = struct.Struct("<BBHIIIIiIQII")
_KNOWN_LATE = struct.Struct("<IQ")
_RECEIVED = struct.Struct("<Q")
"""The fields `payload_bytes` and `received`, and the second of them."""
_TIMES = struct.Struct("<II")
"""The fields after these."""
HEADER_BYTES = _LAYOUT.size
_AFTER_RECEIVED = HEADER_BYTES - _TIMES.size
_UNTIL_RECEIVED = _AFTER_RECEIVED - _RECEIVED.size
_UNTIL_KNOWN_LATE = _AFTER_RECEIVED - _KNOWN_LATE.size
_CLOCK = 2**32
"""Clocks in headers begin again after so many microseconds."""


def pack_header(
    kind: int,
    rank: int,
    key: int = 0,
    slice: int = 0,
    round: int = 0,
    step: int = 0,
    priority: int = URGENT,
    payload_bytes: int = 0,
    flags: int = 0,
    received: int = 0,
    time_us: int = 0,
    worked_us: int = 0,
) -> bytes:
    """The bytes of a header; struct.error if a number does not fit its field."""
    return _LAYOUT.pack(
        kind, flags, rank, key, slice, round, step, priority, payload_bytes, received, time_us,
        worked_us,
    )  # fmt: skip


def with_received(header: bytes, received: int) -> bytes:
    """A header with what the sender has received until now."""
    return header[:_UNTIL_RECEIVED] + _RECEIVED.pack(received) + header[_AFTER_RECEIVED:]


def with_payload(header: bytes, payload_bytes: int, received: int) -> bytes:
    """The same, of a payload whose size was not known before."""
    late = _KNOWN_LATE.pack(payload_bytes, received)
    return header[:_UNTIL_KNOWN_LATE] + late + header[_AFTER_RECEIVED:]


def clock_us(seconds: float) -> int:
    """A time in seconds as headers have it."""
    return int(seconds * 1e6) % _CLOCK


def passed_s(before_us: int, after_us: int) -> float:
    """The seconds between two times in headers that are less than half an hour apart; negative if
    the second one was before the first."""
    return ((after_us - before_us + _CLOCK // 2) % _CLOCK - _CLOCK // 2) / 1e6


def unpack_header(buffer: memoryview, offset: int) -> Header:
    """Reads the header at `offset`, of which all bytes must be there."""
    return Header._make(_LAYOUT.unpack_from(buffer, offset))
