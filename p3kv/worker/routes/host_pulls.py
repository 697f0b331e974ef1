"""Rows that workers of one host pull: they come to the host once, for all that ask for them."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection, Landing, new_memory
from p3kv.wire.fields import PullRowsHeader, RowsHeader
from p3kv.wire.framing import Frame, urgency
from p3kv.wire.header import EXACT, INITIAL_ROUND, Kind
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
from p3kv.worker.routes.host_memory import Carriers
from p3kv.worker.routes.rows import Answer, RowsPull, RowsRoute, Run, runs_of
from p3kv.worker.transfers import Push, WorkerKey, nothing

_RunId = Tuple[int, int, int]
"""The id of a key, a round and a run's number."""


class _Asked(NamedTuple):
    """What a worker of the host has asked for, in the words of a request to the server."""

    header: PullRowsHeader
    words: np.ndarray


class _Joint(RowsPull):
    """A pull from one server for several workers."""

    host: HostPulls
    """Passes what comes on to them."""
    several: Sequence[_Asked]

    def landing_memory(self, answer: Answer, header: RowsHeader) -> None:
        """Nowhere: they are not kept."""

    def received(self, header: RowsHeader, run: Run, rows: Rows, landed: bool) -> None:
        self.host.pass_on(self.several, header, run, rows)


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
    ) -> None:
        self._rank = rank
        self._neighbours = neighbours
        self._carriers = carriers
        self._rows = rows
        self._exchange = exchange
        self._unasked: Dict[_RunId, List[_Asked]] = {}
        """What this worker has not asked for yet."""
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
            one = _Asked(header, np.empty(0, NUMBER) if words is None else words)
            carrier = self._carriers.carrier(key, piece, pull.round)
            if carrier == self._rank:
                self._add(one)
                continue
            if not self._carriers.have(carrier):  # it has carried the round's sum, and is done
                self._rows.ask(pull, [run])
                continue
            if words is not None:
                pull.arriving[run.server].carrier = carrier
            frame = Frame(pull.urgent, one.header, memoryview(one.words.tobytes()))
            self._neighbours[carrier].writer.push(frame)

    def round_ended(self, push: Push) -> None:
        """Asks for what is wanted of the round: nobody need be waited for any more."""
        for run_id in [one for one in self._unasked if one[:2] == (push.key.key_id, push.round)]:
            self._request(run_id, self._unasked.pop(run_id))

    def missing(self, pull: RowsPull) -> Set[int]:
        """The servers that this worker has asked, or will ask, for rows that are still to come."""
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
        return any(isinstance(pull, _Joint) for pull in self._exchange.pulls)

    def clear(self) -> None:
        """This worker leaves, or the job has failed: it asks for nobody any more."""
        self._leaves = True
        self._unasked.clear()

    def land_ask(self, connection: Connection, header: PullRowsHeader) -> Landing:
        """Lands what a neighbour asks for."""
        if header.payload_bytes % NUMBER.itemsize:
            raise ProtocolError(f"it asks for rows with {header.payload_bytes} bytes")
        return new_memory(header)

    def take_ask(self, connection: Connection, header: PullRowsHeader, payload: memoryview) -> None:
        """Takes it."""
        self._add(_Asked(header, np.frombuffer(payload, NUMBER)))

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

    def _add(self, one: _Asked) -> None:
        if self._leaves:
            return
        header = one.header
        run_id = header.key, header.round, header.slice
        key = self._exchange.keys.get(header.key)
        if header.round <= (INITIAL_ROUND if key is None else key.channel.ended):
            self._request(run_id, [one])
            return
        several = self._unasked.setdefault(run_id, [])
        several.append(one)
        have_asked = {one.header.rank for one in several}
        if have_asked.issuperset(self._carriers.adding(header.key, header.round)):
            self._request(run_id, self._unasked.pop(run_id))

    def _request(self, run_id: _RunId, several: Sequence[_Asked]) -> None:
        """Asks the server for what some workers want, each of the same rows once."""
        key = self._exchange.keys[run_id[0]]
        runs = list(runs_of(key))
        if run_id[2] >= len(runs):
            raise ProtocolError(f"a neighbour asks for rows of run {run_id[2]} of {key.called}")
        run = runs[run_id[2]]
        alike: Dict[Tuple[int, bytes], List[_Asked]] = {}
        for one in several:
            names = one.header.flags & PullRowsHeader.NAMED
            if names and not len(one.words):
                continue
            if names:
                check_numbers(one.words, 0, run.rows)
            since = b"" if names else one.words.tobytes()
            alike.setdefault((one.header.flags, since), []).append(one)
        for together in alike.values():
            self._request_alike(key, run, together)

    def _request_alike(self, key: WorkerKey, run: Run, several: Sequence[_Asked]) -> None:
        header, words = several[0]
        own = self._exchange.pull(header.request)
        if len(several) == 1 and header.rank == self._rank and isinstance(own, RowsPull):
            self._rows.ask(own, [run])
            return
        named, since = None, {}
        if header.flags & PullRowsHeader.NAMED:
            named = union([one.words for one in several]).astype(np.int64) + run.first
        elif len(words):
            since = {run.server: int(words[0])}
        nowhere = np.empty((0, key.row_elems), key.numpy_dtype)
        joint = _Joint(key, header.round, header.step, 0, nowhere, nothing)
        joint.priority, joint.exact = header.priority, bool(header.flags & EXACT)
        joint.urgent = urgency(header.step, header.priority)
        joint.named, joint.rounds = named, since
        joint.host, joint.several, joint.route = self, several, self._rows
        self._rows.ask(joint, [run])

    def pass_on(self, several: Sequence[_Asked], header: RowsHeader, run: Run, rows: Rows) -> None:
        """Gives each worker the rows that it has asked for."""
        for asked, words in several:
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
