"""Rows that workers of one host pull: they come to the host once, for all that ask for them."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection, Landing, new_memory
from p3kv.wire.fields import PullRowsHeader, RowsHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import EXACT, INITIAL_ROUND, Kind
from p3kv.wire.queue import urgency
from p3kv.wire.rows import (
    NUMBER,
    Rows,
    check_frame,
    check_numbers,
    gathered,
    index_of,
    memory,
    packed,
    union,
    unpacked,
)
from p3kv.worker.exchange import Exchange
from p3kv.worker.routes.carriers import Carriers
from p3kv.worker.routes.rows import Answer, RowsPull, RowsRoute, Run, runs_of
from p3kv.worker.transfers import Transfer, WorkerKey

_Place = Tuple[int, int, int]
"""The id of a key, a round and a run's number."""


class _Wish(NamedTuple):
    """What a worker of the host has asked for, in the words of a request to the server."""

    header: PullRowsHeader
    words: np.ndarray


class _Joint(RowsPull):
    """A pull from one server for several workers, which `pass_on` gives them."""

    __slots__ = ("pass_on",)
    pass_on: Callable[[RowsHeader, Run, Rows], None]

    def landing_memory(self, answer: Answer, header: RowsHeader) -> None:
        """Nowhere: they are not kept."""

    def received(self, header: RowsHeader, run: Run, rows: Rows, landed: bool) -> None:
        self.pass_on(header, run, rows)


class HostPulls:
    """Has the carrier of a server's rows ask for them, for itself and its neighbours.

    A worker tells the carrier what it pulls for a round that has not ended (PULL_ROWS). The carrier
    waits until all that push for the round have asked, or the round has ended: the server would
    not answer before. It asks once for rows that several workers name, or that have changed since
    the same round, and passes them on as they arrive (ROWS). Who asks later is asked for alone, so
    workers need not pull alike. A worker whose carrier has left asks the server itself.

    Belongs to the worker's thread.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Mapping[int, Connection],
        carriers: Carriers,
        rows: RowsRoute,
        exchange: Exchange,
        on_passed: Callable[[], None],
    ) -> None:
        """`on_passed` is called when nothing is to come any more that neighbours want."""
        self._rank = rank
        self._neighbours = neighbours
        self._carriers = carriers
        self._rows = rows
        self._exchange = exchange
        self._on_passed = on_passed
        self._wishes: Dict[_Place, List[_Wish]] = {}
        """What this worker has not asked for yet."""
        self._passing = 0
        """How many answers are to come that neighbours want."""
        self._leaves = False
        """Whether this worker asks for nobody any more."""

    def ask(self, pull: RowsPull) -> None:
        """Asks for rows of a round that has not ended."""
        key = pull.key
        runs = list(runs_of(key))
        wanted = [self._rows.expect(pull, run) for run in runs]
        if not pull.arriving:
            self._rows.ask(pull, runs)
            return
        for piece, run, words in zip(key.direct.pieces(key, pull.round), runs, wanted):
            header = self._rows.asking(pull, piece.index)
            # Who wants none says so, or the carrier would wait for it.
            wish = _Wish(header, np.empty(0, NUMBER) if words is None else words)
            carrier = self._carriers.carrier(key, piece, pull.round)
            if carrier == self._rank:
                self._add(wish)
                continue
            if words is not None:
                pull.arriving[run.server].carrier = carrier
            frame = Frame(
                urgency(pull.step, pull.priority), wish.header, memoryview(wish.words.tobytes())
            )
            self._neighbours[carrier].writer.push(frame)

    def round_ended(self, push: Transfer) -> None:
        """Asks for what is wanted of the round: nobody need be waited for any more."""
        for place in [one for one in self._wishes if one[:2] == (push.key.key_id, push.round)]:
            self._request(place, self._wishes.pop(place))

    def missing(self, pull: RowsPull) -> Set[int]:
        """The servers of which this worker has asked, or will ask, for what is to come."""
        return {server for server, one in pull.arriving.items() if one.carrier is None}

    def go_on_without(self, rank: int) -> None:
        """A neighbour has left, and with it what it was asked for."""
        for pull in self._exchange.pulls:
            if isinstance(pull, RowsPull):
                lost = [one.run for one in pull.arriving.values() if one.carrier == rank]
                if lost:
                    self._rows.ask(pull, lost)

    @property
    def passes_on(self) -> bool:
        """Whether answers are to come that neighbours want."""
        return self._passing > 0

    def clear(self) -> None:
        """This worker leaves, or the job has failed: it asks for nobody any more."""
        self._leaves = True
        self._wishes.clear()

    def land_ask(self, connection: Connection, header: PullRowsHeader) -> Landing:
        """Lands what a neighbour asks for."""
        if header.payload_bytes % NUMBER.itemsize:
            raise ProtocolError(f"it asks for rows with {header.payload_bytes} bytes")
        return new_memory(header)

    def take_ask(self, connection: Connection, header: PullRowsHeader, payload: memoryview) -> None:
        """Takes it."""
        self._add(_Wish(header, np.frombuffer(payload, NUMBER)))

    def land_rows(self, connection: Connection, header: RowsHeader) -> Landing:
        """Lands rows that a neighbour passes on; ProtocolError if none are expected of it."""
        pull, answer = self._exchange.pull(header.request), None
        if isinstance(pull, RowsPull) and pull.key.key_id == header.key:
            runs = pull.key.runs
            answer = pull.arriving.get(runs[header.slice][0]) if header.slice < len(runs) else None
        if answer is None or answer.carrier != header.rank or header.frames < 1:
            raise ProtocolError(
                f"it has rows of key {header.key}, round {header.round}, which nobody waits for"
            )
        assert isinstance(pull, RowsPull)
        key = pull.key
        check_frame(header, answer.run.rows, key.row_elems * key.item_bytes)
        payload = memory(header.payload_bytes)
        return payload, (pull, answer, payload)

    def take_rows(
        self,
        connection: Connection,
        header: RowsHeader,
        landed: Tuple[RowsPull, Answer, memoryview],
    ) -> None:
        """Takes these rows."""
        pull, answer, payload = landed
        rows = unpacked(header, payload, pull.key.numpy_dtype, pull.key.row_elems)
        self._rows.add(pull, answer, header, rows)

    def _add(self, wish: _Wish) -> None:
        if self._leaves:
            return
        header = wish.header
        place = header.key, header.round, header.slice
        key = self._exchange.keys.get(header.key)
        if header.round <= (INITIAL_ROUND if key is None else key.channel.ended):
            self._request(place, [wish])
            return
        wishes = self._wishes.setdefault(place, [])
        wishes.append(wish)
        have_asked = {one.header.rank for one in wishes}
        if have_asked.issuperset(self._carriers.adding(header.key, header.round)):
            self._request(place, self._wishes.pop(place))

    def _request(self, place: _Place, wishes: Sequence[_Wish]) -> None:
        """Asks the server for what some workers want, each of the same rows once."""
        key = self._exchange.keys[place[0]]
        runs = list(runs_of(key))
        if place[2] >= len(runs):
            raise ProtocolError(f"a neighbour asks for rows of run {place[2]} of {key.called}")
        run = runs[place[2]]
        alike: Dict[Tuple[int, bytes], List[_Wish]] = {}
        for wish in wishes:
            names = wish.header.flags & PullRowsHeader.NAMED
            if names and not len(wish.words):
                continue
            if names:
                check_numbers(wish.words, 0, run.rows)
            since = b"" if names else wish.words.tobytes()
            alike.setdefault((wish.header.flags, since), []).append(wish)
        for together in alike.values():
            self._request_alike(key, run, together)

    def _request_alike(self, key: WorkerKey, run: Run, wishes: Sequence[_Wish]) -> None:
        header, words = wishes[0]
        own = self._exchange.pull(header.request)
        if len(wishes) == 1 and header.rank == self._rank and isinstance(own, RowsPull):
            self._rows.ask(own, [run])
            return
        named, since = None, {}
        if header.flags & PullRowsHeader.NAMED:
            named = union([one.words for one in wishes]).astype(np.int64) + run.first
        elif len(words):
            since = {run.server: int(words[0])}
        joint = _Joint(
            key, header.round, header.step, header.priority,
            np.empty((0, key.row_elems), key.numpy_dtype), self._passed,
            named=named, since=since, exact=bool(header.flags & EXACT),
        )  # fmt: skip
        joint.pass_on = partial(self._pass_on, wishes)
        joint.route = self._rows
        self._passing += 1
        self._rows.ask(joint, [run])

    def _passed(self, error: Optional[BaseException]) -> None:
        self._passing -= 1
        if error is None:
            self._on_passed()

    def _pass_on(self, wishes: Sequence[_Wish], header: RowsHeader, run: Run, rows: Rows) -> None:
        for asked, words in wishes:
            places = np.arange(len(rows.numbers))
            if asked.flags & PullRowsHeader.NAMED:
                nearest = np.minimum(words.searchsorted(rows.numbers), len(words) - 1)
                places = np.flatnonzero(words[nearest] == rows.numbers)
            some, numbers = index_of(places), packed(rows.numbers[places])
            answer = RowsHeader(
                Kind.ROWS, self._rank, numbers.flags, key=asked.key, round=header.round,
                priority=asked.priority, request=asked.request, frames=header.frames,
                slice=asked.slice, first=numbers.first, rows=numbers.rows,
            )  # fmt: skip
            if asked.rank == self._rank:
                pull = self._exchange.pull(asked.request)
                assert isinstance(pull, RowsPull)
                own = Rows(rows.numbers[places], rows.elements[some])
                self._rows.add(pull, pull.arriving[run.server], answer, own)
            else:
                payload = gathered(rows.elements, some, numbers.gaps)
                frame = Frame(urgency(asked.step, asked.priority), answer, payload)
                self._neighbours[asked.rank].writer.push(frame)
