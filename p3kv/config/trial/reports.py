"""Report of a trial's workers to whoever has started it: marked lines on their standard error.

So it takes the way of all output, from other hosts, too, and needs no connection of its own.
"""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional, Tuple

import msgspec

_MARK = "p3kv-trial "
_GOES_ON, _ENDS = "+", "."
_PIECE_CHARS = 3000
"""The kernel writes a line of less than 4096 bytes to a pipe in one go, whoever else writes."""


class LayerReady(NamedTuple):
    """When the gradient of a key was ready, in seconds after the first one of its step."""

    key: int
    size_bytes: int
    ready_s: float


class Report(msgspec.Struct):
    """Measurements of a worker. It tells the first, empty report when it begins."""

    times_s: Tuple[float, ...] = ()
    """When each step's gradient of one and the same parameter was ready, from the first on."""
    cpu_s: Tuple[float, ...] = ()
    """Processor time of the worker's process until then, from the first on."""
    server_s: float = 0.0
    """With p3kv: for how long in each step the server has worked that has worked most."""
    layers: Tuple[LayerReady, ...] = ()
    """Keys of a worker that computes alone, those first whose gradients are ready first."""
    link_bytes_s: Optional[float] = None
    """With p3kv: what a host's link carries in each direction, if it was measured."""
    sends_all: bool = True
    """Whether a step sends every element of every key: no codec, and no sparse gradients."""
    front_end: str = ""
    """The script's."""
    native: str = ""
    """Name of the framework's own synchronous store."""
    notes: Tuple[str, ...] = ()
    """Differences between this trial and the others."""


def tell(report: Report) -> None:
    """Writes a report for `Reports` to read."""
    text = msgspec.json.encode(report).decode()
    pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
    for number, piece in enumerate(pieces, 1):
        mark = _MARK + (_ENDS if number == len(pieces) else _GOES_ON)
        # The script may have left a line of progress open.
        os.write(2, f"\n{mark}{piece}\n".encode())


class Reports:
    """Finds the reports in the lines of several workers."""

    def __init__(self) -> None:
        self.newest: Dict[str, Report] = {}
        """By worker."""
        self._pieces: Dict[str, List[str]] = {}

    def take(self, worker: str, line: str) -> bool:
        """Takes a line of a worker; false if it is none of a report."""
        if not line.startswith(_MARK):
            return False
        end, piece = line[len(_MARK) :][:1], line[len(_MARK) + 1 :]
        pieces = self._pieces.setdefault(worker, [])
        pieces.append(piece)
        if end == _ENDS:
            self.newest[worker] = msgspec.json.decode("".join(pieces), type=Report)
            pieces.clear()
        return True
