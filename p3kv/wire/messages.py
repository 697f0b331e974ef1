"""All messages between processes, declared once.

Data frames, between workers and servers, have a header (`p3kv.wire.header`) and a payload: a
slice's elements, or one of the messages below. Control messages go through the scheduler over
ZeroMQ. Messages are MessagePack, typed and validated by msgspec on arrival; nothing that arrives
can name code to run.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import msgspec

from p3kv import errors
from p3kv.config import MAX_SLICE_ELEMS, ROLES, Settings
from p3kv.errors import P3Error, ProtocolError
from p3kv.registry import MAX_NAME_CHARS, Choice
from p3kv.transport import MAX_ADDRESS
from p3kv.wire.header import LAST_ROUND

PROTOCOL_VERSION = 6
TOKEN_BYTES = 16
"""The job's token comes before a data hello's MessagePack, as plain bytes: a server decodes nothing
from a peer without the token."""
MAX_HELLO_BYTES = 4096
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_TO_SCHEDULER_BYTES = 1024 * 1024
"""The scheduler reads from any peer, and no peer has long messages for it."""
MAX_KEY_ELEMS = 2**36
"""Elements of a key's tensor: a quarter of a terabyte of float32."""
MAX_DIMENSIONS = 32
MAX_HOST_CHARS = 255
DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""All that can be summed and that every process has: no bool, and no bfloat16."""
MAX_RANK = 2**16 - 1
MAX_STATE_ARRAYS = 1024
MAX_BARRIER_CHARS = 256


def workers(ranks: Iterable[int]) -> str:
    """Workers' names in messages to users: "worker 1", or "workers 0, 2"."""
    numbers = sorted(ranks)
    return ("worker " if len(numbers) == 1 else "workers ") + ", ".join(map(str, numbers))


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages that travel as MessagePack.

    Messages with numbers that are used in computations have a `__post_init__` that raises
    ProtocolError for wrong values. So numbers are checked on arrival, before they are used.
    """


def _check(allowed: bool, what: object) -> None:
    if not allowed:
        raise ProtocolError(f"a message is not what the protocol allows: {what}")


def _check_number(what: str, number: Optional[int], lowest: int, highest: int) -> None:
    allowed = number is None or lowest <= number <= highest
    _check(allowed, f"{what} is {number}, and must be from {lowest} to {highest}")


def _check_name(what: str, name: str) -> None:
    _check(len(name) <= MAX_NAME_CHARS, f"{what} is too long")


def check_slice_size(slice_size: Optional[int]) -> None:
    """Raises ProtocolError for a size that slices can't have; None is one that is not set."""
    _check_number("the most elements in a slice", slice_size, 1, MAX_SLICE_ELEMS)


Key = Union[int, str]
MAX_KEY_ID = 2**32 - 1
MAX_STORE = 2**16 - 1
"""A process may have several stores, numbered in the order in which it creates them. Each has keys
and an optimizer of its own."""


def _check_tensor(key: Key, shape: Tuple[int, ...], dtype: str, layout: str) -> None:
    _check(dtype in DTYPES, f"key {key!r} has dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    _check(len(shape) <= MAX_DIMENSIONS, f"key {key!r} has too many dimensions")
    _check(all(extent >= 0 for extent in shape), f"key {key!r} has the shape {shape}")
    # Not with numpy, whose integers overflow.
    elems = math.prod(shape)
    _check(elems <= MAX_KEY_ELEMS, f"key {key!r} has {elems} elements; at most {MAX_KEY_ELEMS} may")
    _check_name("a layout's name", layout)


def _check_runs(key: Key, shape: Tuple[int, ...], runs: List[Tuple[int, int]]) -> None:
    servers = {server for server, _ in runs}
    _check(len(servers) == len(runs), f"key {key!r} has several runs on a server")
    for server, length in runs:
        _check_number("a rank", server, 0, MAX_RANK)
        _check(length > 0, f"key {key!r} has {length} elements on server {server}")
    elems = sum(length for _, length in runs)
    _check(elems == math.prod(shape), f"key {key!r} has {elems} elements for the shape {shape}")


def _check_shape(key: Key, shape: Tuple[int, ...]) -> None:
    _check(len(shape) <= MAX_DIMENSIONS, f"key {key!r} has too many dimensions")
    _check(all(extent >= 0 for extent in shape), f"key {key!r} has the shape {shape}")


def called(key: Key, name: Optional[str]) -> str:
    """A key's name in messages to users, with the parameter's name if it is known."""
    return f"key {key!r}" if name is None or name == key else f"parameter '{name}' (key {key!r})"


UNKNOWN = -1
"""A rank or round that is not known (yet)."""


class Failure(Message, frozen=True):
    """Why the job ends: the same text in every process."""

    reason: str
    """What was wrong, in one line."""
    role: str
    """Role and rank of the process that the failure is about."""
    rank: int
    round: int = UNKNOWN
    error: str = "PeerLostError"
    """Name of the class in p3kv.errors to raise."""
    hint: str = ""
    """What the user can do about it, in whole sentences."""

    @property
    def where(self) -> str:
        """The process that the failure is about, and the round that it had reached."""
        who = self.role if self.rank == UNKNOWN else f"{self.role} {self.rank}"
        return who if self.round == UNKNOWN else f"{who} (round {self.round})"

    @property
    def words(self) -> str:
        """Reason and hint."""
        return f"{self.reason.rstrip('.')}. {self.hint}" if self.hint else self.reason

    def __post_init__(self) -> None:
        _check(self.role in ROLES, f"a failure of the role {self.role!r}")
        _check_number("a rank", self.rank, UNKNOWN, MAX_RANK)
        _check_number("a round", self.round, UNKNOWN, LAST_ROUND)

    def to_error(self) -> P3Error:
        """The exception that tells the user."""
        error = errors.named(self.error)(f"{self.where}: {self.words}")
        error.brief = f"{self.where}: {self.reason}"
        error.role = self.role
        error.rank = None if self.rank == UNKNOWN else self.rank
        error.round = None if self.round == UNKNOWN else self.round
        return error


class JobSettings(Message, frozen=True):
    """The settings that hold for the whole job: all workers have the same.

    Names and defaults are those of `Settings`.
    """

    slice_size: Optional[int] = Settings.slice_size
    """None: by the network's rate, which all workers will measure."""
    deterministic: bool = Settings.deterministic
    stall_timeout_s: float = Settings.stall_timeout_s
    placement: str = Settings.placement
    consistency: str = Settings.consistency

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)
        for name in (self.placement, self.consistency):
            _check(
                len(name) <= MAX_NAME_CHARS,
                f"a name has {len(name)} letters; at most {MAX_NAME_CHARS} may",
            )

    @classmethod
    def of(cls, settings: Settings) -> JobSettings:
        """The part of a worker's settings that holds for the whole job."""
        return cls(**{name: getattr(settings, name) for name in cls.__struct_fields__})

    def besides(self, other: JobSettings) -> str:
        """What differs from another worker's settings, in messages: "slice_size=1"."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        differing = (name for name in values if values[name] != getattr(other, name))
        return ", ".join(f"{name}={values[name]!r}" for name in differing)


# On data connections.


class DataHello(Message, frozen=True):
    """A worker's first words to a server, after the job's token."""

    rank: int
    settings: JobSettings


class CodecChoices(Message, frozen=True):
    """By which codecs a key's slices travel."""

    gradients: Choice = Choice(Settings.gradient_codec)
    values: Choice = Choice(Settings.value_codec)

    def __post_init__(self) -> None:
        for choice in (self.gradients, self.values):
            _check_name("a codec's name", choice.name)
            for name, value in choice.parameters.items():
                _check_name("the name of a codec's parameter", name)
                if isinstance(value, str):
                    _check_name("a codec's parameter", value)


class DeclaredKey(Message, frozen=True):
    """A key as all processes know it.

    The scheduler's answer to DeclareKey. A worker passes it on to the servers that keep the key.
    """

    key_id: int
    key: Key
    shape: Tuple[int, ...]
    dtype: str
    runs: List[Tuple[int, int]]
    """How many of its elements each server keeps, as the job's placement has chosen."""
    name: Optional[str] = None
    """The parameter's name in all processes: that of the worker that declared it first."""
    layout: str = "dense"
    """As in DeclareKey, like what follows."""
    codecs: CodecChoices = CodecChoices()
    store: int = 0
    whole: bool = False
    """Whether one server must keep all elements, for an optimizer that needs whole tensors."""

    def __post_init__(self) -> None:
        _check_number("a store's number", self.store, 0, MAX_STORE)
        _check_number("a key's id", self.key_id, 0, MAX_KEY_ID)
        _check_tensor(self.key, self.shape, self.dtype, self.layout)
        _check_runs(self.key, self.shape, self.runs)


class Terms(Message, frozen=True):
    """What all processes must agree on in a round."""

    slice_size: int
    """Most elements in a slice."""

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)


class Stalled(Message, frozen=True):
    """A round of a key waits for workers that have not pushed."""

    key_id: int
    called: str
    round: int
    missing: List[int]
    arrived: List[int]
    """Ranks of the workers that have pushed, or that wait for the initial value."""
    waited_s: float
    timeout_s: float
    """How long it may wait before the job fails."""


class ForwardOrder(Message, frozen=True):
    """The order in which the forward pass needs the keys, the first layer's first."""

    key_ids: List[int]


class OptimizerSettings(Message, frozen=True):
    """Worker rank 0's optimizer, as its front end has written it for the same one on servers."""

    front_end: str
    settings: bytes

    def __post_init__(self) -> None:
        _check_name("a front end's name", self.front_end)


class StateOutline(Message, frozen=True):
    """What an optimizer remembers of a key on one server; the arrays' bytes follow."""

    numbers: Optional[Dict[str, Any]]
    """What holds for the whole key; None: it remembers nothing."""
    arrays: List[Tuple[str, str, List[int]]]
    """Name, dtype and shape of each array."""

    def __post_init__(self) -> None:
        _check(len(self.arrays) <= MAX_STATE_ARRAYS, "an optimizer's state has too many arrays")
        for name, dtype, shape in self.arrays:
            _check(dtype in DTYPES, f"an array {name!r} has dtype {dtype!r}")
            _check(len(shape) <= MAX_DIMENSIONS, f"an array {name!r} has too many dimensions")
            _check(all(extent >= 0 for extent in shape), f"an array {name!r} has shape {shape}")


# From a node to the scheduler.


class Hello(Message, frozen=True):
    """A process asks to be part of the job."""

    protocol: int
    version: str
    job: str
    role: str
    rank_wish: Optional[int]
    host: str
    port: int
    """Where a server listens, by its transport's number; 0 for a worker."""
    pid: int
    transport: str
    """By which transport workers connect to a server; empty for a worker."""

    def __post_init__(self) -> None:
        _check_name("a transport's name", self.transport)
        _check_number("the number of an address", self.port, 0, MAX_ADDRESS)
        _check(len(self.host) <= MAX_HOST_CHARS, "a host's name is too long")


class Ready(Message, frozen=True):
    """A worker's store was created, with these settings."""

    settings: JobSettings


class Measured(Message, frozen=True):
    """A worker has measured the rate at which it can send; sent again when it changes much."""

    rate_bytes_s: float


class DeclareKey(Message, frozen=True):
    """A worker declares a key."""

    key: Key
    shape: Tuple[int, ...]
    dtype: str
    name: Optional[str] = None
    """What the user calls the parameter, where the front end knows; workers may differ."""
    layout: str = "dense"
    """How its tensor may be divided, by the name in `p3kv.slicing.LAYOUTS`."""
    codecs: CodecChoices = CodecChoices()
    store: int = 0
    whole: bool = False
    """Whether one server must keep all elements, for an optimizer that needs whole tensors."""

    def __post_init__(self) -> None:
        _check_number("a store's number", self.store, 0, MAX_STORE)
        _check_tensor(self.key, self.shape, self.dtype, self.layout)


class BarrierReached(Message, frozen=True):
    """A worker waits for all workers."""

    purpose: str = ""
    """What it does there, with all that must be the same on all workers."""

    def __post_init__(self) -> None:
        _check(len(self.purpose) <= MAX_BARRIER_CHARS, "a barrier's purpose is too long")


class ReportFailure(Message, frozen=True):
    """A node says that the job cannot go on."""

    failure: Failure
    second_hand: bool = False
    """The node only saw a connection end; a node that knows the cause counts before it."""


class Alive(Message, frozen=True):
    """A sign of life of a node, and the scheduler's answer to it.

    It only helps to tell a stopped process from an ended one.
    """


class Bye(Message, frozen=True):
    """A node ends in order."""


# From the scheduler to a node.


class Refused(Message, frozen=True):
    """The process can't be part of the job."""

    reason: str


class Welcomed(Message, frozen=True):
    """The scheduler has registered the process and waits for the others."""


class Roster(Message, frozen=True):
    """All processes have arrived: the receiver's rank, and where the servers listen."""

    rank: int
    token: bytes
    servers: List[Tuple[str, int, str]]
    """Each server's host, port and transport, by rank."""
    workers: List[str]
    """Host and process id of each worker, by rank, for messages."""

    def __post_init__(self) -> None:
        _check_number("a rank", self.rank, 0, MAX_RANK)
        _check(len(self.token) == TOKEN_BYTES, f"a token has {len(self.token)} bytes")


class Agreed(Message, frozen=True):
    """Every worker's store has been created, with the same settings."""


class SliceSize(Message, frozen=True):
    """All workers have measured; slices have at most this many elements."""

    slice_size: int

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)


class NewSliceSize(Message, frozen=True):
    """Worker rank 0 is to announce this slice size from a coming round on."""

    slice_size: int

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)


class KeyRefused(Message, frozen=True):
    """The answer to a DeclareKey that contradicts another worker's."""

    reason: str


class BarrierPassed(Message, frozen=True):
    """All workers have reached the barrier."""


class Abort(Message, frozen=True):
    """The job ends because of this."""

    failure: Failure


class Finished(Message, frozen=True):
    """All workers are done: servers may end."""


ToScheduler = Union[Hello, Ready, Measured, DeclareKey, BarrierReached, ReportFailure, Alive, Bye]
FromScheduler = Union[
    Alive,
    Refused,
    Welcomed,
    Roster,
    Agreed,
    SliceSize,
    NewSliceSize,
    DeclaredKey,
    KeyRefused,
    BarrierPassed,
    Abort,
    Finished,
]

_encoder = msgspec.msgpack.Encoder()
_decoders: Dict[Any, msgspec.msgpack.Decoder] = {}


def encode(message: Any) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(data: Union[bytes, memoryview], expected: Any) -> Any:
    """Reads a message of the expected type (or union of types).

    Raises ProtocolError for anything else, and for more than MAX_MESSAGE_BYTES.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    decoder = _decoders.get(expected)
    if decoder is None:
        decoder = _decoders[expected] = msgspec.msgpack.Decoder(expected)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        # Not only msgspec's own errors: text that is not UTF-8, for example, is a ValueError.
        raise ProtocolError(f"a message is not what the protocol allows: {error}") from error
