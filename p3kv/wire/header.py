"""Headers of data frames: each kind has fields of its own (`p3kv.wire.fields`).

Headers are little-endian and equally long. A payload of `payload_bytes` bytes follows: a slice's
elements, or one of the messages (`p3kv.wire.messages`).
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique
from typing import Any, Callable, Tuple, Type

from msgspec.structs import astuple

from p3kv.wire import fields
from p3kv.wire.fields import Header

MAGIC = 0x564B3350
"""'P3KV' in the bytes of a hello."""

MAX_PROBE_BYTES = 64 * 1024
MAX_STATE_BYTES = 256 * 1024
"""Bytes of an optimizer's state in one frame: few, because no slice overtakes it."""
URGENT = 2**31 - 1
"""Priority of frames that carry no slice. They are small, and other frames depend on them."""
LAST = -(2**65)
"""Priority of a goodbye: all that is queued goes before it."""

INITIAL_ROUND = 0
"""The round in which worker rank 0 alone gives a key its initial value."""
LAST_ROUND = 2**32 - 1
"""No header can name a later round or step."""


@unique
class Kind(IntEnum):
    """Kind of a data frame; and its header, where that has fields of its own."""

    header: Type[Header]

    def __new__(cls, number: int, header: Type[Header] = Header) -> Kind:
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.header = header
        return kind

    HELLO = 1, fields.HelloHeader
    """First frame of a worker's connection; payload a nonce and a proof (`wire.credentials`)."""
    CHALLENGE = 25
    """The server's answer to it; payload a nonce and a proof."""
    PROOF = 26
    """The worker's answer to that; payload a proof, then DataHello."""
    WELCOME = 2
    """A server serves the worker from now on; payload DataWelcome."""
    KEY = 3
    """A worker tells a server about a key, before its first slice; payload DeclaredKey."""
    OPTIMIZER = 4, fields.OptimizerHeader
    """Worker rank 0 sends the optimizer settings of a store; the front end makes the payload."""
    PUSH = 5, fields.PushHeader
    """A worker's slice for a round of its key, in a step of its store; payload elements."""
    PULL = 6, fields.PullHeader
    """A worker that has pushed for a round asks for the key's value after it, or a newer one."""
    UPDATED = 7, fields.UpdatedHeader
    """A slice's value after a round, to the workers that asked for it with their push."""
    PULLED = 8, fields.PulledHeader
    """A slice's value, part of the answer to PULL."""
    BYE = 9
    """A worker is done and sends nothing more; the server's answer is its last word, too. To a
    neighbour, payload LastRounds."""
    ORDER = 10
    """Worker rank 0 sends the forward order, and every server passes it on to all workers before
    the results of the round in which rank 0 has learned it; payload ForwardOrder."""
    PROBE = 11
    """A worker measures the network; the server echoes as many bytes."""
    SLICE_SIZES = 12, fields.SliceSizesHeader
    """How large slices are from a round on; payload SliceSizes. Every worker sends the first ones
    before its first slice. When they change, worker rank 0 sends new ones before its first slice of
    a step, for a later round, and the server passes them on to all workers."""
    OPEN = 13, fields.StepHeader
    """A worker tells the servers on its host that it waits for no values of steps before `step`.
    When all workers on the host have said so, each of these servers tells all workers."""
    ENDED = 14, fields.EndedHeader
    """A server tells workers that the key's round has ended on this server, if its result does not
    tell them: they did not ask for one."""
    STALLED = 15
    """A server tells all workers that a round has waited long for a worker; payload Stalled."""
    STATES = 16, fields.StateHeader
    """A worker asks a server for its optimizer's state of a key when a round has ended, or for the
    mean gradient of the round (MEAN)."""
    STATE = 17, fields.StateHeader
    """A server's answer to STATES; or worker rank 0 gives a server the state that its optimizer has
    of a key from the end of a round on. Payload StateOutline."""
    STATE_BYTES = 18, fields.RoundHeader
    """The next bytes of the arrays that the last STATE has announced, array by array."""
    LOADED = 19, fields.RoundHeader
    """A server's optimizer has the state that worker rank 0 has given."""
    CLIPPED = 20, fields.StepHeader
    """No round of a step ends before worker rank 0 has sent SCALE: its gradients are clipped by the
    norm of all. Comes before the step's first slice."""
    STEP_PUSHED = 21, fields.StepHeader
    """Worker rank 0 has pushed all keys of a clipped step; payload StepPushed."""
    SQUARES = 22, fields.StepHeader
    """All gradients of a clipped step that this server gets are summed; payload Squares. To worker
    rank 0 only."""
    SCALE = 23, fields.ScaleHeader
    """Worker rank 0 has the norm of a step; payload Scale."""
    NORM = 24, fields.NormHeader
    """A server tells all workers the norm of a step; payload Norm. Worker rank 0 sends it where a
    vote is late."""
    PUSH_ROWS = 27, fields.PushRowsHeader
    """Some of the rows that a worker has touched, for a round of a key of rows; payload as in
    `p3kv.wire.rows`."""
    PULL_ROWS = 28, fields.PullRowsHeader
    """A worker that has pushed for a round asks for rows of the key's value after it, or of a newer
    one: those that it names (NAMED), those that have changed since the round in the payload, or
    without a payload all. It may ask a neighbour, which asks the server for both."""
    ROWS = 29, fields.RowsHeader
    """Some of the rows of an answer to PULL_ROWS, payload as before. A server counts rows that the
    request names in the request: their numbers do not travel. A neighbour passes them on as they
    are in memory."""
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
    MEMORY = 34, fields.KeyHeader
    """A worker tells a neighbour, another worker of its host, where the memory is that it shares
    for a key; payload SharedMemory. Comes before the frames that speak of it."""
    SUMMAND = 35, fields.SummandHeader
    """A worker's slice, or its rows for a server, are in its shared memory, for the neighbour that
    sends the host's sum; with WANTS_RESULT the worker wants the value."""
    VALUE = 36, fields.ValueHeader
    """The value of a slice is in the shared memory of the neighbour that says so."""
    CUT = 37
    """A worker whose rounds are its own has made all steps that belong to a checkpoint; before it
    pushes for later rounds. Payload CutReached."""
    VOTE = 39, fields.NormHeader
    """A worker says whether it drops a clipped step, or that server tells worker rank 0 whether
    anyone does; payload Vote."""
    FORGET = 38, fields.StoreHeader
    """A worker needs a store's keys no more: all its rounds of them have ended, and it pushes for
    no later ones. When all workers have said so, servers forget them."""


# Flags of several kinds of frames. `p3kv.wire.protocol` says which flags a kind may have.

WANTS_RESULT = 1
"""Flag of PUSH and SUMMAND: send a value here as soon as it is new enough for the worker to go
on."""
ENCODED = 2
"""Flag of PUSH, UPDATED and PULLED: the key's codec has made the payload. Initial values travel as
they are in memory. By the codec `identity` rows are left out (`p3kv.codecs.zero_rows`)."""
EXACT = 4
"""Flag of PUSH, PULL and PULL_ROWS: the value that answers travels as it is in memory."""
HAS_VALUE = 8
"""Flag of PUSH, with NO_GRADIENT: the sender has the value that it was sent last. Where that has
not changed since, UPDATED has no payload. With a gradient: the sender has the value of the round
before, and UPDATED, if it is encoded, needs only the rows that have changed."""
ACKNOWLEDGE = 16
"""Flag of PUSH and PUSH_ROWS, and of a neighbour's BYE: the sender waits until it knows that the
frame has arrived."""
IN_HOST_SUM = 32
"""Flag of PUSH and PUSH_ROWS: what the worker pushes is in the sum of its host's workers, which one
of them sends. With WANTS_RESULT, its result comes to that worker. There is no payload without
CARRIES."""
CARRIES = 64
"""Flag of PUSH and PUSH_ROWS: the payload is of the sum of the host's workers. Without IN_HOST_SUM,
the worker's own push was counted before."""
ONE_BYTE, TWO_BYTES = 1, 8
"""Flags of PUSH_ROWS and ROWS: rows do not follow each other, and the distance of each from the one
before has one byte, or two; with both flags four."""
GAPS = ONE_BYTE | TWO_BYTES
NO_GRADIENT = 128
"""Flag of PUSH, PUSH_ROWS and SUMMAND, which have no payload then: nobody has computed a gradient
on the worker since its last push, and nothing is added. With CARRIES: on none of the workers.
Flag of UPDATED, VALUE and ENDED: no worker had a gradient in the round, and the value is
that of the round before. UPDATED has no payload then where the value is a sum, or the worker has
it."""


_COMMON = len(Header.__struct_fields__)
_FORMAT = "<BHBIQ"
"""The numbers that all headers have, as they lie in memory."""
_OTHERS_BYTES = 40
"""What the numbers that a kind has besides may take."""
HEADER_BYTES = struct.calcsize(_FORMAT) + _OTHERS_BYTES
_TYPES = {"priority": "i", "weight": "d"}
"""Numbers that are not unsigned, of 4 bytes."""
_Form = Tuple[Type[Header], Callable[..., bytes], Callable[[memoryview, int], Tuple[Any, ...]]]


def _form(header: Type[Header]) -> _Form:
    """A header, and what packs and unpacks it."""
    own = header.__struct_fields__[_COMMON:]
    numbers = "".join(_TYPES.get(name, "I") for name in own)
    unused_bytes = _OTHERS_BYTES - struct.calcsize(f"<{numbers}")
    packed = struct.Struct(f"{_FORMAT}{numbers}{unused_bytes}x")
    return header, packed.pack, packed.unpack_from


_FORMS = [_form(Header)] * 256
"""By kind; also for kinds that there are not, which the protocol refuses."""
for _kind in Kind:
    _FORMS[_kind] = _form(_kind.header)


def pack_header(header: Header, payload_bytes: int, received: int) -> bytes:
    """The bytes of a header whose frame begins to leave: now `payload_bytes` and `received` are
    known. Raises struct.error if a number does not fit its field."""
    kind = header.kind
    right, pack, _ = _FORMS[kind]
    assert type(header) is right, f"{header} is no header of {Kind(kind).name}"
    return pack(
        kind, header.rank, header.flags, payload_bytes, received, *astuple(header)[_COMMON:]
    )


def unpack_header(buffer: memoryview, offset: int) -> Header:
    """Reads the header at `offset`, of which all bytes must be there: the one of its kind."""
    header, _, unpack_from = _FORMS[buffer[offset]]
    return header(*unpack_from(buffer, offset))


CLOCK_US = 2**32
"""Clocks in headers begin again after so many microseconds."""


def clock_us(seconds: float) -> int:
    """A time in seconds as headers have it."""
    return int(seconds * 1e6) % CLOCK_US


def passed_s(before_us: int, after_us: int) -> float:
    """The seconds between two times in headers that are less than half an hour apart; negative if
    the second one was before the first."""
    return ((after_us - before_us + CLOCK_US // 2) % CLOCK_US - CLOCK_US // 2) / 1e6
