"""How deeply a MessagePack message nests, found before anything is decoded.

A decoder follows nesting with its own stack, and so does all that later copies, compares or prints
what was decoded. How much stack a process has is the user's setting: a script may have raised
Python's recursion limit.
"""

from __future__ import annotations

from typing import List, Union

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
