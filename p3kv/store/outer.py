"""The outer optimizer that servers run for workers that train by themselves."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

from msgspec import structs

from p3kv.consistency import LocalTraining
from p3kv.errors import CheckpointError
from p3kv.server.optimizer import OUTER, State
from p3kv.server.outer import OuterSettings
from p3kv.store.resuming import Counts, GoesOn, Resuming
from p3kv.store.script_optimizer import ScriptOptimizer
from p3kv.store.states import give_state
from p3kv.store.turns import Schedule
from p3kv.wire.messages import encode
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class OuterOptimizer(ScriptOptimizer):
    """What the servers must be told of it: once, since only `Schedule.averages` changes it."""

    name = "the outer one"
    front_end = OUTER

    def __init__(
        self,
        rule: LocalTraining,
        workers: int,
        schedule: Schedule,
        inner: Callable[[], str],
        of_inner: Callable[[], Dict[str, Any]],
    ) -> None:
        """`inner()` is the class of the workers' own optimizer; `of_inner()` what this worker's has
        changed in itself, as plain values."""
        self._settings = OuterSettings(rule.rate, rule.momentum, 1 if rule.adds else workers)
        self._told = self._settings
        self.rule = rule.chosen
        self.schedule = schedule
        self.inner = inner
        self._of_inner = of_inner

    @property
    def settings(self) -> bytes:
        return encode(self._settings)

    def begin_step(self, step: int, updates: int) -> Optional[bytes]:
        before, self._told = self._told, self._settings
        if self.schedule.averages:
            self._told = structs.replace(before, rate=1.0, momentum=0.0)
        return None if self._told == before else encode(self._told)

    def has_changed(self) -> bool:
        """Says so of each step, so that each has a number: keys that take turns leave in the order
        of these."""
        return True

    def remembered(self) -> Dict[str, Any]:
        return {
            "turns": self.schedule.plain, "inner": self.inner(), "of_inner": self._of_inner()
        }  # fmt: skip


class _OuterGoesOn(GoesOn[OuterOptimizer]):
    """Goes on from a checkpoint: the schedule of turns is that of then."""

    def __init__(self, own: WorkerStore) -> None:
        self._own = own

    def optimizer(self, fresh: OuterOptimizer, counts: Counts, since_step: int) -> OuterOptimizer:
        inner = counts.remembered.get("inner")
        if inner != fresh.inner():
            raise CheckpointError(
                f"the checkpoint is of workers that train by {inner}, and this script has "
                f"{fresh.inner()}; go on with the checkpoint's, or set P3KV_RESUME=0 and "
                "P3KV_CHECKPOINT_DIR to another folder"
            )
        fresh.schedule.go_on(counts.remembered["turns"])
        return fresh

    def give(
        self, key: WorkerKey, states: Sequence[State], optimizer: OuterOptimizer, member: int = 0
    ) -> None:
        give_state(self._own, key, State.joined(states), whole=False)


def set_outer_optimizer(
    own: WorkerStore,
    resuming: Resuming[Any],
    inner: Callable[[], str],
    of_inner: Callable[[], Dict[str, Any]] = dict,
) -> Schedule:
    """Has the servers update a store's values by the mean of what all workers push; returns when
    its keys are exchanged. `inner` and `of_inner` as in `OuterOptimizer`."""
    rule = own.rule.local
    assert rule is not None
    schedule = Schedule(rule)
    outer = OuterOptimizer(rule, own.rule.num_workers, schedule, inner, of_inner)
    resuming.set_optimizer(outer, _OuterGoesOn(own))
    return schedule


def of_inner(own: WorkerStore) -> Dict[str, Any]:
    """What `OuterOptimizer.remembered` has had of this worker's own optimizer, at the checkpoint
    from which the job goes on; nothing if there is nothing."""
    remembered = own.own_numbers.get("remembered", {})
    return dict(remembered.get("of_inner", {}))
