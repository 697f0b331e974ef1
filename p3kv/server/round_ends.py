"""Ends rounds, and has everything come of it that waits for that."""

from __future__ import annotations

from p3kv.common.tracing import Tracer, now_ns
from p3kv.server.engine import Ended, Engine, Key, ServerSlice, Unit
from p3kv.server.saving.checkpoints import Checkpoints
from p3kv.server.spans import trace_update
from p3kv.server.state_service import StateService
from p3kv.server.values import Values
from p3kv.server.waiting import Waiting
from p3kv.server.workers import Workers


class RoundEnds:
    """Ends the rounds that pushes have made complete. Belongs to the server's thread."""

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        values: Values,
        states: StateService,
        checkpoints: Checkpoints,
        waiting: Waiting,
        tracer: Tracer,
    ) -> None:
        self._engine = engine
        self._workers = workers
        self._values = values
        self._states = states
        self._checkpoints = checkpoints
        self._waiting = waiting
        self._tracer = tracer

    def settle(self, unit: Unit) -> None:
        """Ends the complete rounds of a unit, after what may have made them complete."""
        key = self._engine.keys[unit.plan.key_id]
        ended = newly_ended = self._end_rounds(key, unit)
        # What had come for slices of another size may end at once, and be all of that size.
        while newly_ended:
            newly_ended = 0
            for other in key.reslice():
                newly_ended += self._end_rounds(key, other)
                self._waiting.answer_pulls(other)
        if ended and self._states.waiting:
            self._states.round_ended(key)
        if not ended and self._workers.done:
            self._waiting.check(unit)

    def _end_rounds(self, key: Key, unit: Unit) -> int:
        """Ends the complete rounds of a unit; queues each result before it ends the next round."""
        count, start_ns = 0, now_ns()
        for ended in self._engine.end_rounds(unit):
            trace_update(self._tracer, ended, start_ns)
            if self._checkpoints.waits_for_rounds:
                self._checkpoints.unit_ended(ended.unit)
            self._answer(key, ended)
            count += 1
            start_ns = now_ns()
        for answer in self._engine.answers(unit):
            self._answer(key, answer)
        return count

    def _answer(self, key: Key, ended: Ended) -> None:
        """Queues a round's value to the workers that want it."""
        if isinstance(ended.unit, ServerSlice):
            self._values.send_result(ended.unit, ended)
        self._waiting.answer_pulls(ended.unit)
        if ended.others and key.all_ended(ended.round, ended.others[0]):
            self._values.tell_ended(ended)
