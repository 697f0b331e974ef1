"""Basis of all messages: their limits, checks and encoding."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Union

import msgspec

from p3kv.common.registry import MAX_CHOICE_CHARS, MAX_NAME_CHARS
from p3kv.config import MAX_SLICE_ELEMS
from p3kv.errors import ProtocolError
from p3kv.wire.messages.depth import MAX_DEPTH, is_too_deep

PROTOCOL_VERSION = 36
TOKEN_BYTES = 16
"""The job's token is random, and other in each run. It is part of the key of data connections."""
MAX_PROOF_BYTES = 4096
"""A proof and the DataHello behind it, which is decoded when the proof is right."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_TO_SCHEDULER_BYTES = 1024 * 1024
"""The scheduler reads from any peer, and no peer has long messages for it."""
MAX_RANK = 2**16 - 1
MAX_RECEIVED = 2**63 - 1
"""No connection carries more bytes or messages."""

PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
"""The types of plain values, but for lists and dicts."""
UNKNOWN = -1
"""A rank or round that is not known (yet)."""


def workers(ranks: Iterable[int]) -> str:
    """Workers' names in messages to users: "worker 1", or "workers 0, 2"."""
    numbers = sorted(ranks)
    return ("worker " if len(numbers) == 1 else "workers ") + ", ".join(map(str, numbers))


def waited(ranks: Iterable[int], seconds: float) -> str:
    """For how long something lacks, and who has waited, which may be nobody but the one that is
    missing: "for which worker 1 waited 10 s"."""
    known = set(ranks)
    return (
        f"for which {workers(known)} waited {int(seconds)} s" if known else f"for {int(seconds)} s"
    )


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages that travel as MessagePack.

    Messages with numbers that are used in computations have a `__post_init__` that raises
    ProtocolError for wrong values. So numbers are checked on arrival, before they are used.
    """


def check(allowed: bool, what: object) -> None:
    if not allowed:
        raise ProtocolError(f"a message is not what the protocol allows: {what}")


def check_number(what: str, number: Optional[int], lowest: int, highest: int) -> None:
    allowed = number is None or lowest <= number <= highest
    check(allowed, f"{what} is {number}, and must be from {lowest} to {highest}")


def check_name(what: str, name: str) -> None:
    check(len(name) <= MAX_NAME_CHARS, f"{what} is too long")


def check_choice(what: str, text: str) -> None:
    check(len(text) <= MAX_CHOICE_CHARS, f"{what} is too long")


def check_received(received: int) -> None:
    """Raises ProtocolError for what nobody can have received."""
    check_number("what was received before", received, 0, MAX_RECEIVED)


def check_slice_size(slice_size: Optional[int]) -> None:
    """Raises ProtocolError for a size that slices can't have; None is one that is not set."""
    check_number("the most elements in a slice", slice_size, 1, MAX_SLICE_ELEMS)


def check_plain(what: str, value: Any) -> None:
    """Raises ProtocolError for all but None, bools, numbers, strs, and lists and dicts of these."""
    if type(value) in PLAIN_TYPES:  # nearly always, and each step asks
        return
    if isinstance(value, dict):
        for key, item in value.items():
            check_plain(what, key)
            check_plain(what, item)
    elif isinstance(value, list):
        for item in value:
            check_plain(what, item)
    else:
        plain = value is None or isinstance(value, (bool, int, float, str))
        check(plain, f"{what} has a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder()
_decoders: Dict[Any, msgspec.msgpack.Decoder] = {}


def encode(message: Any) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(data: Union[bytes, memoryview], expected: Any) -> Any:
    """Reads a message of the expected type (or union of types).

    Raises ProtocolError for anything else, for more than MAX_MESSAGE_BYTES, and for deeper nesting
    than MAX_DEPTH. Size and depth are checked before anything is decoded.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    check(not is_too_deep(data), f"it nests deeper than {MAX_DEPTH} arrays and maps")
    decoder = _decoders.get(expected)
    if decoder is None:
        decoder = _decoders[expected] = msgspec.msgpack.Decoder(expected)
    try:
        return decoder.decode(data)
    except ProtocolError:
        raise
    except Exception as error:
        # Not only msgspec's own errors: text that is not UTF-8 is a ValueError, for example.
        # Whatever it is, the bytes are the cause.
        raise ProtocolError(f"a message is not what the protocol allows: {error}") from error
