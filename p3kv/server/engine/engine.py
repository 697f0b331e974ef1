"""Decisions of a server: which pushes count, which rounds end, who gets which value, who waits.

Nothing here knows of sockets, queues or threads: what workers say goes in, and what a server is to
do comes out as commands.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Union

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.engine.keys import ServerKey
from p3kv.server.engine.rounds import Record, Round, Wait
from p3kv.server.engine.state import KeyPlan, ServerState
from p3kv.server.optimizer import Optimizer
from p3kv.wire.fields import PullHeader
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, SliceSizes, Vote, workers
from p3kv.wire.slice_sizes import SliceSizesByRound

_SAME_STEPS = (
    "All workers must make the same number of steps: give each the same number of batches, or set "
    "P3KV_LET_WORKERS_LEAVE=1 on all to have the others go on."
)
_NEEDS_RANK_0 = (
    "Worker 0 must stay for each key's first round, while gradients are clipped by their norm, and "
    "with an optimizer whose updates leave numbers for the next key: give it the most batches."
)


class Pull(NamedTuple):
    """A worker's request for a record's value; as a command: answer it, the value is new enough."""

    record: Record[Any]
    request: PullHeader
    words: Optional[np.ndarray]
    """Of rows: the payload, which tells for which rows it asks."""
    since_s: float
    """Since when it waits, on the monotonic clock."""


class Answer(NamedTuple):
    """Command: send the value to a round's worker, which had to wait for others since the round has
    ended."""

    round: Round[Any]


class SendSquares(NamedTuple):
    """Command: tell worker rank 0 numbers whose sum is that of a clipped step's squares here."""

    step: int
    squares: List[float]
    share: float
    """Number of workers, divided by the sum of their weights in the step."""


class SendVotes(NamedTuple):
    """Command: tell worker rank 0 whether any worker drops a clipped step; all have voted."""

    store: int
    number: int
    drops: bool


class Blame(NamedTuple):
    """Command: end the job because of a worker."""

    rank: int
    reason: str
    hint: str


Command = Union[Round[Any], Answer, Pull, SendSquares, SendVotes, Blame]
"""What a server is to do. A round: it has ended; send the value to its workers, unless they must
wait for others (`Round.answered`), before the next command is asked for."""


class Engine:
    """All keys of a server. Belongs to the server's thread."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.keys: Dict[int, ServerKey] = {}
        """By the key's id."""
        self.pulls: Dict[Record[Any], List[Pull]] = {}
        """Requests for values that are not new enough yet."""
        self._sizes = SliceSizesByRound()

    # What workers say of their keys.

    def set_slice_sizes(self, from_round: int, sizes: SliceSizes) -> bool:
        """Set the slice sizes from a round on; return False if they are known. ProtocolError when
        it contradicts an earlier announcement, or a key would have too many slices."""
        for key in self.keys.values():
            key.check_slices(sizes.slice_size)
        return self._sizes.set(from_round, sizes)

    def declare(self, declared: DeclaredKey) -> ServerKey:
        """Keep a key from now on. Raises what `KeyPlan` raises, and ProtocolError before the first
        slice sizes, or when another worker has declared the key otherwise."""
        if self._sizes.generation(INITIAL_ROUND) < 0:
            raise ProtocolError("it has not said how large slices are")
        known = self.keys.get(declared.key_id)
        if known is None:
            known = ServerKey(KeyPlan(declared, self.state), self._sizes)
            self.keys[declared.key_id] = known
        if known.declared != declared:
            raise ProtocolError(f"it declares a key otherwise than another worker: {declared}")
        return known

    def key(self, key_id: int, rank: int) -> ServerKey:
        """The key of which a worker speaks; ProtocolError if nobody has declared it."""
        key = self.keys.get(key_id)
        if key is None:
            raise ProtocolError(f"worker {rank} speaks of key {key_id}, unknown here")
        return key

    def key_of_slices(self, key_id: int, rank: int) -> ServerKey:
        """The key of whose slices a worker speaks; ProtocolError if it has none."""
        key = self.keys.get(key_id)
        if key is None or key.plan.layout.touched_only:
            key = self.key(key_id, rank)
            raise ProtocolError(f"worker {rank} speaks of slices of {key.plan.called}")
        return key

    def key_of_rows(self, key_id: int, rank: int) -> ServerKey:
        """The key of whose rows a worker speaks; ProtocolError if it is none of rows."""
        key = self.key(key_id, rank)
        if not key.plan.layout.touched_only:
            raise ProtocolError(f"worker {rank} speaks of rows of {key.plan.called}")
        return key

    def records(self) -> Iterator[Record[Any]]:
        """Everything that ends rounds by itself."""
        return (record for key in self.keys.values() for record in key.all_records)

    # What holds for a whole store, or the whole job.

    def set_optimizer(self, store: int, optimizer: Optimizer) -> Sequence[Record[Any]]:
        """Install a store's optimizer; return the records whose own rounds may end now."""
        self.state.optimizers[store] = optimizer
        keys = [key for key in self.keys.values() if key.declared.store == store]
        for key in keys:
            key.plan.optimizer = optimizer
        return [one for key in keys if key.plan.own_rounds for one in key.all_records]

    def forget(self, store: int) -> None:
        """Forget a store's keys, of which all rounds have ended for all workers, and its
        optimizer."""
        state = self.state
        gone = {id_: key for id_, key in self.keys.items() if key.declared.store == store}
        for id_ in gone:
            del self.keys[id_]
        for current in [one for one in state.in_flight if one.record.plan.key_id in gone]:
            del state.in_flight[current]
        for record in [one for one in self.pulls if one.plan.key_id in gone]:
            del self.pulls[record]
        state.optimizers.pop(store, None)
        for key in gone.values():
            key.forget()
        state.pool.clear()

    def begin_clipped(self, step: int) -> None:
        """Hold a step's rounds until it is known how its gradients are scaled."""
        self.state.clipped.begin(step)
        self.state.has_clipped = True

    def end_pushes(self, step: int, elems: int) -> Iterator[Command]:
        """Note how many elements worker rank 0 has pushed here in a clipped step, that is all."""
        self.state.clipped.end_pushes(step, elems)
        return self._complete_squares()

    def vote(self, store: int, number: int, rank: int, vote: Vote) -> Iterator[Command]:
        """Count a worker's vote on the clipped step with a number."""
        votes = self.state.clipped.vote(store, number, rank, vote)
        if len(votes) < self.state.num_workers:
            return
        for other, its in votes.items():
            if its.factor != votes[0].factor:
                yield Blame(
                    other,
                    f"it unscales gradients by {its.factor:g}, and worker 0 by {votes[0].factor:g}",
                    "Give GradScaler the same settings, and the same state, on all workers.",
                )
        yield SendVotes(store, number, any(one.drops for one in votes.values()))

    def leave(self, rank: int) -> Sequence[Round[Any]]:
        """Have rounds go on without a worker; return those that may end, or be answered, now."""
        if rank in self.state.left:
            return []
        self.state.left.add(rank)
        waiting = (record.rounds.oldest_waiting() for record in self.records())
        return [current for current in waiting if current is not None]

    # Rounds that end, and values.

    def end_rounds(self, record: Record[Any]) -> Iterator[Command]:
        """End the complete rounds of a record, usually none or one. The caller carries out each
        command before it asks for the next: a value that no frame sends is updated in place."""
        state, own_rounds = self.state, record.plan.own_rounds
        to_look_at: Iterable[Record[Any]] = (record,)
        ended_records: Dict[Record[Any], None] = {}
        while to_look_at:
            has_ended = False
            for one in to_look_at:
                rounds = one.rounds
                while rounds.open and (current := rounds.next()) is not None:
                    together = one.end(current)
                    if not together:
                        break  # another slice of the tensor is not complete
                    has_ended = True
                    for ended in together:
                        ended_records[ended.record] = None
                        yield ended
                        if self.pulls:
                            yield from self._new_enough(ended.record)
                if one is not record and self.pulls:
                    yield from self._new_enough(one)  # it has a value now
            # What had come for slices of another size may end at once, and be all of that size.
            key = self.keys[record.plan.key_id]
            is_cut_anew = has_ended and key.generation < self._sizes.last_generation
            to_look_at = key.reslice() if is_cut_anew else ()
        if own_rounds:
            for one in {record: None, **ended_records}:
                for answered in one.rounds.answered():
                    yield Answer(answered)
                if self.pulls:
                    yield from self._new_enough(one)
        if state.clipped.complete:
            yield from self._complete_squares()
        if state.gone and not ended_records:
            yield from self._blame_for_pushes(record)

    def pull(
        self, key: ServerKey, request: PullHeader, words: Optional[np.ndarray] = None
    ) -> Iterator[Command]:
        """Answer a request for a key's value, when it is new enough; ProtocolError for one that
        can't be right."""
        key.check_ahead(request.round, request.rank)
        now_s = time.monotonic()
        for record in key.records(request.round):
            pull = Pull(record, request, words, now_s)
            if record.rounds.is_new_enough(request.rank, request.round):
                yield pull
            else:
                self.pulls.setdefault(record, []).append(pull)
        yield from self._blame_for_initial_values()

    def _new_enough(self, record: Record[Any]) -> Iterator[Command]:
        pulls, rounds = self.pulls.pop(record, []), record.rounds
        for pull in pulls:
            if rounds.is_new_enough(pull.request.rank, pull.request.round):
                yield pull
            else:
                self.pulls.setdefault(record, []).append(pull)

    def _complete_squares(self) -> Iterator[Command]:
        clipped = self.state.clipped
        while clipped.complete:
            step = clipped.complete.pop()
            its = clipped.steps[step]
            yield SendSquares(step, its.squares, its.share)

    # Who waits for whom.

    def longest_waits(self, least_s: float, now_s: float) -> Iterator[Wait]:
        """Rounds that have waited for a worker's push for so long, the longest first; of each key
        those with the lowest number.

        A later round may be open for longer, where a worker has pushed for it and not for the one
        before. The others can't have pushed for it, and are not to blame.
        """
        latest_s = now_s - least_s
        order = itertools.count()
        found = [(one.since_s, next(order), one) for one in self._initial_waits()]
        heapq.heapify(found)
        seen: Set[int] = set()
        for current in self.state.in_flight:
            if current.since_s > latest_s:
                break
            while found and found[0][0] <= current.since_s:
                yield heapq.heappop(found)[-1]
            key_id = current.record.plan.key_id
            if key_id not in seen:
                seen.add(key_id)
                for wait in _oldest_waits(self.keys[key_id].all_records):
                    heapq.heappush(found, (wait.since_s, next(order), wait))
        while found and found[0][0] <= latest_s:
            yield heapq.heappop(found)[-1]

    def blame(self) -> Iterator[Command]:
        """End the job if anything waits for a worker that has left."""
        for record in self.records():
            for blame in self._blame_for_pushes(record):
                yield blame
                return
        yield from self._blame_for_initial_values()

    def _blame_for_pushes(self, record: Record[Any]) -> Iterator[Command]:
        for wait in record.rounds.waits():
            for rank in wait.missing:
                if rank in self.state.gone:
                    yield Blame(
                        rank,
                        f"it ended in order, but {workers(wait.arrived)} "
                        f"went on to round {wait.round} of {record.plan.called}",
                        _NEEDS_RANK_0 if self.state.workers_may_leave else _SAME_STEPS,
                    )
                    return

    def _blame_for_initial_values(self) -> Iterator[Command]:
        if 0 in self.state.gone:
            for wait in self._initial_waits():
                yield Blame(
                    0,
                    f"it ended in order, and {wait.record.plan.called} has no initial value for "
                    f"{workers(wait.arrived)}",
                    "Worker 0 gives all initial values: all workers must train the same "
                    "parameters.",
                )
                return

    def _initial_waits(self) -> Iterator[Wait]:
        """Records that have no value at all, for which workers have asked."""
        for record, pulls in self.pulls.items():
            # Slices of a later size have no value before their first round, and wait for others.
            if record.round < INITIAL_ROUND and record.first_round == INITIAL_ROUND:
                ranks = sorted({pull.request.rank for pull in pulls})
                since_s = min(pull.since_s for pull in pulls)
                yield Wait(record, INITIAL_ROUND, [0], ranks, since_s)


def _oldest_waits(records: Iterable[Record[Any]]) -> List[Wait]:
    """A key's rounds that wait for workers and have the lowest number of these."""
    waits = [wait for record in records for wait in record.rounds.waits() if wait.missing]
    oldest = min((wait.round for wait in waits), default=INITIAL_ROUND)
    return [wait for wait in waits if wait.round == oldest]
