"""Decisions of a server: which pushes count, which rounds end, and with which value workers go on.

Nothing here knows of sockets, queues or threads: what workers say goes in, and rounds that have
ended come out.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

from p3kv.codecs import Part
from p3kv.common.finite import NotFinite
from p3kv.errors import ProtocolError
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.keys import ServerKey
from p3kv.server.engine.plan import Hold, KeyPlan, Rules
from p3kv.server.engine.rounds import Round
from p3kv.server.engine.rows import RowsKey
from p3kv.server.engine.slices import ServerSlice, update_together
from p3kv.server.engine.sums import SliceSum
from p3kv.server.engine.unit import Ended, Unit
from p3kv.server.optimizer import Optimizer
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, SliceSizes
from p3kv.wire.slice_sizes import SliceSizesByRound

Key = Union[ServerKey, RowsKey]


class Engine:
    """All keys of a server. Belongs to the server's thread."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.keys: Dict[int, Key] = {}
        """By the key's id."""
        self._sizes = SliceSizesByRound()

    # What workers say of their keys.

    def set_slice_sizes(self, from_round: int, sizes: SliceSizes) -> bool:
        """Sets the slice sizes from a round on; False if they are known already.

        Raises ProtocolError when it contradicts an earlier announcement, and when a key would have
        too many slices.
        """
        for key in self.keys.values():
            if isinstance(key, ServerKey):
                key.check_slices(sizes.slice_size)
        return self._sizes.set(from_round, sizes)

    def declare(self, declared: DeclaredKey) -> Key:
        """Keeps a key from now on.

        Raises ProtocolError before the first slice sizes, and when another worker has declared the
        key otherwise, and what `KeyPlan` raises.
        """
        if self._sizes.generation(INITIAL_ROUND) < 0:
            raise ProtocolError("it has not said how large slices are")
        known = self.keys.get(declared.key_id)
        if known is None:
            plan = KeyPlan(declared, self.rules)
            if plan.layout.touched_only:
                known = RowsKey(plan, self._sizes)
            else:
                known = ServerKey(plan, self._sizes)
                known.check_slices(self._sizes.smallest_slice_size)
            self._plan_holds(plan)
            self.keys[declared.key_id] = known
        if known.declared != declared:
            raise ProtocolError(f"it declares a key otherwise than another worker: {declared}")
        return known

    def key(self, key_id: int, rank: int) -> Key:
        """The key of which a worker speaks; ProtocolError if nobody has declared it."""
        key = self.keys.get(key_id)
        if key is None:
            raise ProtocolError(f"worker {rank} speaks of key {key_id}, unknown here")
        return key

    def key_of_slices(self, key_id: int, rank: int) -> ServerKey:
        """The key of whose slices a worker speaks; ProtocolError if it has none."""
        key = self.keys.get(key_id)
        if not isinstance(key, ServerKey):
            key = self.key(key_id, rank)
            raise ProtocolError(f"worker {rank} speaks of slices of {key.plan.called}")
        return key

    def key_of_rows(self, key_id: int, rank: int) -> RowsKey:
        """The key of whose rows a worker speaks; ProtocolError if it is none of rows."""
        key = self.key(key_id, rank)
        if not isinstance(key, RowsKey):
            raise ProtocolError(f"worker {rank} speaks of rows of {key.plan.called}")
        return key

    def units(self) -> Iterator[Unit]:
        """Everything that ends rounds by itself."""
        return (unit for key in self.keys.values() for unit in key.units)

    # What holds for a whole store, or the whole job.

    def set_optimizer(self, store: int, optimizer: Optimizer) -> Sequence[Unit]:
        """Has a store's optimizer make values from now on, with the settings that it has now;
        returns the units whose rounds may end now: those that are a worker's own have waited for
        it."""
        self.rules.optimizers[store] = optimizer
        keys = [key for key in self.keys.values() if key.declared.store == store]
        for key in keys:
            self._plan_holds(key.plan)
        return [u for key in keys if key.plan.consistency.own_rounds for u in key.units]

    def forget(self, store: int) -> None:
        """Forgets a store's keys and its optimizer."""
        rules = self.rules
        gone = {id_: key for id_, key in self.keys.items() if key.declared.store == store}
        for id_ in gone:
            del self.keys[id_]
        for current in [one for one, id_ in rules.open_rounds.items() if id_ in gone]:
            del rules.open_rounds[current]
        rules.optimizers.pop(store, None)
        for key in gone.values():
            if isinstance(key, ServerKey):
                key.forget()
        rules.pool.clear()

    def begin_clipped(self, step: int) -> None:
        """Holds a step's rounds until it is known how its gradients are scaled."""
        self.rules.held_rounds.begin(step)
        if not self.rules.leavers.clips:
            self.rules.leavers.clips = True
            for key in self.keys.values():
                self._plan_holds(key.plan)

    def leave(self, rank: int) -> Sequence[Tuple[Unit, Round]]:
        """Has rounds go on without a worker from now on; returns the units that may have waited for
        it, with a round that may end now, or have its answer."""
        if rank in self.rules.leavers.ranks:
            return []
        self.rules.leavers.ranks.add(rank)
        waiting = ((unit, _oldest_waiting(unit)) for unit in self.units())
        return [(unit, oldest) for unit, oldest in waiting if oldest is not None]

    def _plan_holds(self, plan: KeyPlan) -> None:
        """Decides what holds back the complete rounds of a key."""
        holds: List[Hold] = []
        if plan.consistency.own_rounds:
            if plan.lacks_settings:
                holds.append(_lacks_settings)
        else:
            if plan.sums_on_hosts:
                holds.append(_lacks_host_sum)
            if self.rules.leavers.clips and plan.optimizer is not None:
                holds.append(_lacks_scale)
        optimizer = plan.optimizer
        if optimizer is not None and optimizer.whole_tensors and not plan.layout.touched_only:
            holds.append(_lacks_slices)
        plan.holds = tuple(holds)

    # What workers push.

    def push(
        self,
        slice_: ServerSlice,
        rank: int,
        round: int,
        gradient: Optional[Buffer],
        wants_result: bool,
        priority: int,
        step: int,
        encoded: Optional[memoryview] = None,
    ) -> Round[SliceSum]:
        """Adds a worker's slice, and owns `gradient` from now on; call `end_rounds` afterwards.

        `gradient` has the slice's elements, or the bytes `encoded` that its codec reads; None: the
        worker has none. Raises ProtocolError for a push that can't be right.
        """
        if gradient is None and round == INITIAL_ROUND:
            raise ProtocolError(f"it gave no initial value of {slice_.name}")
        current = slice_.ledger.round_for(rank, round, step)
        current.arrived.add(rank)
        (current.wanting if wants_result else current.others).append(rank)
        current.priority = priority
        if gradient is None:
            current.lacks_gradient = True
        elif encoded is None:
            current.sum.add(rank, gradient)
        else:
            _add_encoded(slice_, current, rank, gradient, encoded)
        return current

    def push_in_host_sum(
        self,
        unit: Unit,
        rank: int,
        round: int,
        wants_result: bool,
        step: int,
    ) -> Round:
        """Counts a worker whose push is in the sum of its host's workers, which comes by
        `push_host_sum`, or `RowsKey.push`.

        If the worker wants a result, whoever sends the sum gets it.

        ProtocolError for a push that can't be right.
        """
        plan = unit.plan
        if round == INITIAL_ROUND or plan.consistency.own_rounds:
            raise ProtocolError(f"it sums {unit.name} with others, in round {round}")
        if not plan.sums_on_hosts:
            plan.sums_on_hosts = True
            self._plan_holds(plan)
        current = unit.ledger.round_for(rank, round, step)
        current.arrived.add(rank)
        if not wants_result:
            current.others.append(rank)
        current.in_sums += 1
        return current

    def push_host_sum(
        self,
        slice_: ServerSlice,
        rank: int,
        round: int,
        total: Optional[Buffer],
        wants_result: bool,
        priority: int,
        workers: int,
        encoded: Optional[memoryview] = None,
    ) -> None:
        """Adds the sum of so many of a host's workers, which are counted each on its own, its
        sender before; otherwise as `push`. None: none of them had a gradient."""
        current = slice_.ledger.round_of_sum(rank, round, workers)
        current.in_sums -= workers
        if wants_result:
            current.wanting.append(rank)
        current.priority = priority
        if total is None:
            current.lacks_gradient = True
            return
        try:
            if encoded is None:
                current.sum.add(rank, total)
            else:
                _add_encoded(slice_, current, rank, total, encoded)
        except NotFinite as error:
            # Workers have checked their gradients: it is no single one that is too large.
            raise NotFinite(error.what, slice_.plan.called, round) from None

    # What comes out.

    def end_rounds(self, unit: Unit) -> Iterator[Ended]:
        """Ends the rounds of a unit that are complete, usually none or one.

        Where the optimizer needs whole tensors, a round ends for all slices of the key when it is
        complete for the last of them, and each slice has a result.

        It ends the next round when the caller asks for the next result. By then the caller must
        have queued the result before: a value that no frame is being sent from is updated in place.
        """
        holds, ledger = unit.plan.holds, unit.ledger
        while (ledger.open or ledger.own) and (current := _next_round(unit)) is not None:
            if holds and isinstance(unit, ServerSlice) and _needs_whole(unit, current):
                yield from _end_together(unit, current)
            else:
                yield _ended(unit, current, unit.update(current))

    def answers(self, unit: Unit) -> Iterator[Ended]:
        """The answers to rounds that have ended before, of workers that had to wait for slower ones
        and need not any more; to be asked for after `end_rounds`."""
        for current in unit.ledger.take_answered():
            yield _answer(unit, current)


# Which round ends next.


def _next_round(unit: Unit) -> Optional[Round]:
    holds = unit.plan.holds
    for current in unit.ledger.complete():
        if (
            not holds
            or current.number == INITIAL_ROUND
            or not any(hold(unit, current) for hold in holds)
        ):
            return current
    return None


def _oldest_waiting(unit: Unit) -> Optional[Round]:
    ledger = unit.ledger
    return ledger.unanswered[0] if ledger.unanswered else ledger.open.get(ledger.round + 1)


def _lacks_settings(unit: Unit, current: Round) -> bool:
    return True


def _lacks_host_sum(unit: Unit, current: Round) -> bool:
    """Whether the sum of a host has not come. The round is complete, so the worker that sends it is
    there: if one has left that was to send it, another one does."""
    if current.in_sums < 0:
        raise ProtocolError(
            f"sums of {unit.name} in round {current.number} have {-current.in_sums} slices more "
            "than workers have said"
        )
    return current.in_sums > 0


def _lacks_scale(unit: Unit, current: Round) -> bool:
    """Whether the norm of the round's step is not known; what it takes of the unit for that is
    given once."""
    held_rounds = unit.plan.rules.held_rounds
    if held_rounds.is_new(current.step, unit):
        held_rounds.hold(current.step, unit, unit.size_elems, unit.summed(current))
    return held_rounds.holds(current.step)


def _lacks_slices(slice_: ServerSlice, current: Round[SliceSum]) -> bool:
    """Whether the round, which ends for all slices of the key, is not complete for one of them."""
    if not _needs_whole(slice_, current):
        return False
    # The last slices usually come last: if one is missing, it is found at once.
    return not all(_same_round(other, current) for other in reversed(slice_.of_key.values()))


def _needs_whole(slice_: ServerSlice, current: Round[SliceSum]) -> bool:
    """Whether a round of a slice ends with those of all slices."""
    optimizer = slice_.plan.optimizer
    if optimizer is None or not optimizer.whole_tensors or current.number == INITIAL_ROUND:
        return False
    return optimizer.needs_whole(slice_.plan.update_step(current))


def _same_round(slice_: ServerSlice, current: Round[SliceSum]) -> Optional[Round[SliceSum]]:
    """A slice's round that is to end with another slice's; None while it is not complete."""
    for one in slice_.ledger.complete():
        if (one.owner, one.number) == (current.owner, current.number) and not one.in_sums:
            return one
    return None


# How it ends.


def _end_together(slice_: ServerSlice, current: Round[SliceSum]) -> List[Ended]:
    slices = list(slice_.of_key.values())
    rounds = [one for one in (_same_round(other, current) for other in slices) if one is not None]
    changed = update_together(slices, rounds)
    return [_ended(one, of_one, changed) for one, of_one in zip(slices, rounds)]


def _ended(unit: Unit, current: Round, changed: bool) -> Ended:
    current.changed = changed
    ledger = unit.ledger
    ledger.end(current)
    if ledger.unanswered and ledger.unanswered[-1] is current:
        return Ended(unit, current.number, current.step, current.priority, [], [])
    return _answer(unit, current)


def _answer(unit: Unit, current: Round) -> Ended:
    return Ended(
        unit, current.number, current.step, current.priority, current.wanting, current.others,
        current.have_value, current.have_last, not unit.ledger.has_changed_for(current),
        current.exact,
    )  # fmt: skip


def _add_encoded(
    slice_: ServerSlice,
    current: Round[SliceSum],
    rank: int,
    gradient: Buffer,
    encoded: memoryview,
) -> None:
    part = Part(slice_.offset, current.number, current.step)
    current.sum.add_encoded(rank, encoded, part)
    gradient.retire()
