"""In which order a worker's gradients leave: the most urgent first, or as they become ready."""

from __future__ import annotations

from typing import Mapping

from p3kv.wire.connection import Connection


class Departures:
    """Has the gradients of a backward pass leave in turn until the pass is over, where that pays.

    While a pass computes, each gradient is more urgent than those before it, and workers turn to it
    at different moments. So servers have parts of many slices and all of few, and links that carry
    values only idle. In turn, gradients leave in the same order on all workers. What is left at the
    end of the pass goes by urgency. Where hosts are alike, all links have gradients to carry
    meanwhile; and where the network is quick, first layers would wait. Belongs to the worker's
    thread.
    """

    def __init__(self, servers: Mapping[int, Connection]) -> None:
        self._servers = servers
        self._in_turn = False
        self.pays = False
        """Whether gradients should leave in turn; it holds from the next transfer on."""

    def begin(self, last: bool) -> None:
        """To be called before each transfer of a pass is sent; `last`: all others have begun."""
        in_turn = self.pays and not last
        if in_turn != self._in_turn:
            self._in_turn = in_turn
            for connection in self._servers.values():
                connection.writer.take_turns(in_turn)
