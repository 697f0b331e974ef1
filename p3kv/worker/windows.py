"""How far a worker may be ahead: transfers that wait until older ones have ended."""

from __future__ import annotations

from typing import Dict, List, Optional, Set, Tuple

from p3kv.errors import ProtocolError
from p3kv.wire.fields import EndedHeader
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.transfers import Transfer, WorkerKey


class Windows:
    """Holds a transfer of a key's round until the one `window` rounds before it has ended.

    This is the back-pressure on a worker that is ahead. A held transfer is an operation of the
    framework that is not complete, so what depends on it waits, too, and servers keep few rounds.
    Rounds of a slice end in order, so one number says which rounds of a key have ended on all its
    servers.

    A push also waits for the pulls of its key that were called before it. They may begin later,
    when their arrays are ready, and a server answers with the newest value that it has: without an
    optimizer, the sum of the push's round in place of an initial value.

    Until a key's first round has ended, no more are open than the job's rule admits, though the
    key's own may have a wider window. Changing the slice size relies on this (`worker/tuning.py`),
    and so do pulls: a server that receives a pull for a round knows the slice size of that round.
    Belongs to the worker's thread.
    """

    def __init__(self, first: int) -> None:
        """`first`: the job's window."""
        self._first = first
        self._ended: Dict[int, int] = {}
        """The last round of each key that has ended on all its servers."""
        self._held: Dict[int, List[Transfer]] = {}
        self._expected: Dict[Tuple[int, int], Tuple[Transfer, Set[int]]] = {}
        """By key and round: a push whose round's end no result tells, and the servers that have not
        ended it yet."""

    def admits(self, transfer: Transfer) -> bool:
        """Whether a transfer may be sent now."""
        key = transfer.key
        if transfer.source is not None and not all(ask.answered for ask in transfer.asks):
            return False
        ended = self._ended.get(key.key_id)
        if ended is None:
            return transfer.round <= INITIAL_ROUND + min(self._first, key.consistency.window)
        return transfer.round <= ended + key.consistency.window

    def hold(self, transfer: Transfer) -> None:
        """Keeps a transfer until `end` or `note_answered` returns it."""
        self._held.setdefault(transfer.key.key_id, []).append(transfer)

    def expect(self, transfer: Transfer) -> None:
        """Expects an ENDED frame from each server of a push that wants no result."""
        servers = {server for server, _ in transfer.key.runs}
        self._expected[transfer.key.key_id, transfer.round] = (transfer, servers)

    def check(self, header: EndedHeader) -> Transfer:
        """The push that expects an ENDED frame; ProtocolError if none does."""
        transfer, servers = self._expected.get((header.key, header.round), (None, ()))
        if transfer is None or header.rank not in servers or header.payload_bytes:
            raise ProtocolError(
                f"it sent the end of round {header.round} of key {header.key} with "
                f"{header.payload_bytes} bytes, which nobody waits for"
            )
        return transfer

    def note_ended(self, header: EndedHeader) -> List[Transfer]:
        """Takes note that a round has ended on a server.

        Returns the push whose round has ended on all its servers now, if there is one.
        """
        transfer, servers = self._expected[header.key, header.round]
        servers.remove(header.rank)
        if servers:
            return []
        del self._expected[header.key, header.round]
        return [transfer]

    def is_idle(self, key: WorkerKey) -> bool:
        """Whether all rounds have ended that the script has called for a key."""
        if key.size_elems == 0:
            return True  # nothing travels
        held = key.key_id in self._held or any(one == key.key_id for one, _ in self._expected)
        return not held and self._ended.get(key.key_id, INITIAL_ROUND) >= key.round

    def forget(self, key_id: int) -> None:
        """Nothing of a key is exchanged any more."""
        self._ended.pop(key_id, None)

    def end(self, transfer: Transfer) -> List[Transfer]:
        """Takes note that a round has ended on all servers; returns the transfers to send now."""
        key_id = transfer.key.key_id
        self._ended[key_id] = max(transfer.round, self._ended.get(key_id, INITIAL_ROUND))
        return self._released(key_id)

    def note_answered(self, pull: Transfer) -> List[Transfer]:
        """Takes note that a pull has its value; returns the transfers to send now."""
        for ask in pull.asks:
            ask.answered = True
        return self._released(pull.key.key_id)

    def _released(self, key_id: int) -> List[Transfer]:
        held = self._held.pop(key_id, None)
        if held is None:
            return []
        free = [one for one in held if self.admits(one)]
        if len(free) < len(held):
            self._held[key_id] = [one for one in held if not self.admits(one)]
        return sorted(free, key=lambda one: one.round)

    @property
    def oldest(self) -> Optional[Tuple[Transfer, Set[int]]]:
        """The first push whose round's end is expected, and the servers that have not ended it."""
        return next(iter(self._expected.values()), None)

    @property
    def expecting(self) -> List[Transfer]:
        """The pushes whose round's end is expected."""
        return [transfer for transfer, _ in self._expected.values()]

    def clear(self) -> List[Transfer]:
        """Forgets all transfers, and returns those that were held."""
        held = [transfer for waiting in self._held.values() for transfer in waiting]
        self._held.clear()
        self._expected.clear()
        return held
