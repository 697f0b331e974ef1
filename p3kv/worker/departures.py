"""In which order a worker's gradients leave: the most urgent first, or as they become ready."""

from __future__ import annotations

from typing import Mapping

from p3kv.wire.connection import Connection
from p3kv.wire.pace import Pace


class Departures:
    """Has the gradients of a backward pass leave in turn until the pass is over, where that pays.

    While a pass computes, each gradient is more urgent than those before it, and workers turn to it
    at different moments. So servers have parts of many slices and all of few, and links that carry
    values only idle. In turn, gradients leave in the same order on all workers. What is left at the
    end of the pass goes by urgency. Connections are kept in step meanwhile, so that servers that
    keep more get more of the link. Where hosts are alike, all links have gradients to carry; and
    where the network is quick, first layers would wait. Belongs to the worker's thread.
    """

    def __init__(self, servers: Mapping[int, Connection], pace: Pace) -> None:
        """`pace` is that of the event loop."""
        self._servers = servers
        self._pace = pace
        self._pays = pace.keeps
        self._in_turn = False

    @property
    def pays(self) -> bool:
        """Whether gradients should leave in turn, from the next transfer on, and connections be
        kept in step."""
        return self._pays

    @pays.setter
    def pays(self, pays: bool) -> None:
        self._pays = self._pace.keeps = pays

    def begin(self, last: bool) -> None:
        """To be called before each transfer of a pass is sent; `last`: all others have begun."""
        in_turn = self._pays and not last
        if in_turn != self._in_turn:
            self._in_turn = in_turn
            for connection in self._servers.values():
                connection.writer.take_turns(in_turn)
