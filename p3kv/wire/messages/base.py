"""Basis of all messages: their limits, checks and encoding."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Union

import msgspec

from p3kv.common.registry import MAX_CHOICE_CHARS, MAX_NAME_CHARS
from p3kv.config import MAX_SLICE_ELEMS
from p3kv.errors import ProtocolError

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


MAX_DEPTH = 32
"""Arrays and maps within each other. The messages that p3kv makes need fewer than ten."""

_CONTAINERS = frozenset((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
_OTHERS = bytes(byte for byte in range(256) if byte not in _CONTAINERS)
_PLAIN_BYTES = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""By the first byte: how many bytes follow it."""
_SIZED = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
"""By the first byte: how many bytes the length has, and how many follow besides the content."""


def is_too_deep(data: Union[bytes, memoryview]) -> bool:
    """Whether a message nests deeper than MAX_DEPTH. What is no MessagePack is left to its decoder.

    Bytes that can begin an array or a map are counted first, which is fast. Few messages have more
    of them than MAX_DEPTH, and only these are walked through.
    """
    return len(bytes(data).translate(None, _OTHERS)) > MAX_DEPTH and _walk(bytes(data))


def _walk(data: bytes) -> bool:
    """Whether an array or a map begins within MAX_DEPTH others."""
    missing: List[int] = []
    """Number of items not begun of each open array or map, the outermost first."""
    at, end = 0, len(data)
    while at < end:
        first = data[at]
        at += 1
        while missing and not missing[-1]:
            missing.pop()
        if missing:
            missing[-1] -= 1
        if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
            continue
        if first in _CONTAINERS:
            if len(missing) >= MAX_DEPTH:
                return True
            count = first & 15
            if first >= 0xDC:
                count_bytes = 2 if first in (0xDC, 0xDE) else 4
                count = int.from_bytes(data[at : at + count_bytes], "big")
                at += count_bytes
            is_map = first < 0x90 or first >= 0xDE
            missing.append(2 * count if is_map else count)
        elif first < 0xC0:
            at += first & 31
        elif first in _SIZED:
            length_bytes, more = _SIZED[first]
            at += length_bytes + more + int.from_bytes(data[at : at + length_bytes], "big")
        else:
            at += _PLAIN_BYTES.get(first, 0)
    return False
