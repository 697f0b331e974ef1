"""Where workers wait for each other: who is told, and when they would wait for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from p3kv.scheduler.membership import JobFails, Membership, Node, Replies
from p3kv.wire.messages import (
    MAX_AWAITED,
    AskWhereabouts,
    CallAwaited,
    Failure,
    Whereabouts,
    workers,
)

_ASK_S = 1.0
"""How long to wait for answers at least, and before workers are asked again."""
_NAMED = 4
"""So many workers are named, each with what it does."""

Round = Tuple[int, int]
"""A key's id, and its round."""


@dataclass
class _Call:
    """A call that all workers must make, in which one waits."""

    number: int
    purpose: str
    place: str
    since_s: Optional[float] = None


class _Seen(NamedTuple):
    """State of all workers at one time."""

    states: Dict[bytes, Tuple[str, int]]
    """By worker: the kind of what keeps it, and the number of the call or the wait."""
    awaits: Dict[bytes, List[Round]]


class Deadlocks:
    """Who waits for whom: in calls that all workers must make, and for values.

    After some time in a call all workers are told who has not made it. Where each waits for what
    another would have to do first, the job ends.
    """

    def __init__(self, members: Membership) -> None:
        self._members = members
        self.workers_may_leave = False
        """Whether a worker whose script has ended is not waited for once it has left."""
        self._calls: Dict[bytes, _Call] = {}
        self._num_calls = 0
        self._answers: Dict[bytes, Whereabouts] = {}
        """Of the last question; or told unasked since."""
        self._asked: Dict[bytes, List[Round]] = {}
        """By worker, the rounds that it waits for, as all workers were asked about them."""
        self._asked_at: Optional[float] = None
        self._ask_at = 0.0
        self._before: Optional[_Seen] = None
        self._told_s = 0.0

    def enter(self, node: Node, purpose: str, place: str) -> None:
        """A worker waits in a call until all have made it."""
        self._num_calls += 1
        self._calls[node.identity] = _Call(self._num_calls, purpose, place)

    def passed(self) -> None:
        """All have made the call."""
        self._calls.clear()
        self._told_s = 0.0

    def purpose(self, node: Node) -> Optional[str]:
        """Purpose of the call in which a worker waits, if any."""
        call = self._calls.get(node.identity)
        return None if call is None else call.purpose

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, node: Node, whereabouts: Whereabouts) -> None:
        """A worker says where its script is, asked or not."""
        self._answers[node.identity] = whereabouts

    def look(self, now: float, first_s: float) -> Replies:
        """Ask or tell workers, about each second; JobFails where they would wait for ever.
        `first_s`: how long one waits before others are told."""
        for call in self._calls.values():
            call.since_s = now if call.since_s is None else call.since_s
        if self._asked_at is not None:
            everybody = self._present()
            complete = all(worker.identity in self._answers for worker in everybody)
            if not complete and now < self._asked_at + 2 * _ASK_S:
                return []
            self._asked_at = None
            return self._judge(complete, now, first_s)
        longest_s = self._longest_s(now)
        if now < self._ask_at or not (longest_s >= first_s or self._all_wait(first_s)):
            return []
        self._asked_at = now
        # Later, where nothing has come of it for long.
        self._ask_at = now + max(_ASK_S, longest_s / 20)
        return self._ask()

    def _present(self) -> List[Node]:
        return [worker for worker in self._members.workers if not worker.gone]

    def _longest_s(self, now: float) -> float:
        since = [call.since_s for call in self._calls.values() if call.since_s is not None]
        return now - min(since, default=now)

    def _all_wait(self, first_s: float) -> bool:
        """Whether each worker waits in a call, or has said that its script has waited long."""
        told = self._answers
        return all(
            one.identity in self._calls
            or (one.identity in told and told[one.identity].waited_s >= first_s)
            for one in self._present()
        )

    def _ask(self) -> Replies:
        everybody = self._present()
        each = MAX_AWAITED // max(1, len(everybody))
        self._asked = {
            one.identity: list(self._answers[one.identity].awaits[:each])
            for one in everybody
            if one.identity in self._answers
        }
        self._answers.clear()
        rounds = list(dict.fromkeys(one for its in self._asked.values() for one in its))
        return [(one.identity, AskWhereabouts(tuple(rounds))) for one in everybody]

    def _judge(self, complete: bool, now: float, first_s: float) -> Replies:
        before, self._before = self._before, self._seen(first_s) if complete else None
        if before is not None and self._before is not None and self._never_ends(before):
            raise JobFails(self._deadlock())
        longest_s = self._longest_s(now)
        if longest_s >= max(first_s, 2 * self._told_s):
            self._told_s = longest_s
            told = CallAwaited(self._awaited(longest_s))
            return [(one.identity, told) for one in self._present()]
        return []

    def _seen(self, first_s: float) -> _Seen:
        states = {}
        for one in self._present():
            call, answer = self._calls.get(one.identity), self._answers[one.identity]
            if call is not None:
                states[one.identity] = ("call", call.number)
            elif not answer.place and not self.workers_may_leave:
                states[one.identity] = ("end", 0)
            else:
                is_long = answer.waited_s >= first_s
                states[one.identity] = ("wait" if is_long else "", answer.wait)
        return _Seen(states, dict(self._asked))

    def _never_ends(self, before: _Seen) -> bool:
        """Whether no worker can go on: all were held at one time between two questions, and what
        each waits for would have to be pushed by another that is held."""
        now = self._before
        assert now is not None
        if before.states != now.states or all(kind == "end" for kind, _ in now.states.values()):
            return False
        lacking: Set[Round] = set()
        for answer in self._answers.values():
            lacking.update(answer.lacks)
        for identity, (kind, _) in now.states.items():
            awaits = now.awaits.get(identity, [])
            if not kind or (kind == "wait" and not (awaits and lacking.issuperset(awaits))):
                return False
        return True

    def _deadlock(self) -> Failure:
        everybody = self._present()
        elsewhere = [one for one in everybody if one.identity not in self._calls] or everybody
        blamed = elsewhere[0]
        others = [one for one in everybody if one is not blamed]
        # First those in calls, of which each stands for all in the same.
        others.sort(key=lambda one: one.identity not in self._calls)
        clauses = [f"{one.hello.role} {one.rank} {self.does(one)}" for one in others[:_NAMED]]
        if len(others) > _NAMED:
            clauses.append(f"{len(others) - _NAMED} more workers wait as well")
        return Failure(
            f"it {self.does(blamed)}, and {', and '.join(clauses)}: each waits for what another "
            "would have to do first",
            "worker",
            blamed.rank,
            error="P3Error",
            hint="All workers must make the same calls in the same order: call what waits for all "
            "workers on each of them, and not inside an 'if' that holds for some.",
        )

    def _awaited(self, longest_s: float) -> str:
        everybody = self._present()
        inside = [one for one in everybody if one.identity in self._calls]
        outside = [one for one in everybody if one.identity not in self._calls]
        call = self._calls[inside[0].identity]
        names = workers([one.rank for one in inside])
        what = f"{names} {_have(inside)} waited {math.floor(longest_s)} s "
        what += (call.purpose or "at a barrier") + _at(call.place)
        missing = workers([one.rank for one in outside])
        doing = [f"worker {one.rank} {self.does(one)}" for one in outside[:_NAMED]]
        return (
            f"{what}, and {missing} {_have(outside)} not made this call: {', '.join(doing)}"
            f"{', ...' if len(outside) > _NAMED else ''}. It returns when all have made it: all "
            "workers must make the same calls in the same order."
        )

    def does(self, one: Node) -> str:
        """Say what a worker does, as far as it is known."""
        call, answer = self._calls.get(one.identity), self._answers.get(one.identity)
        if call is not None:
            return f"waits {call.purpose or 'at a barrier'}" + _at(call.place)
        if answer is None:
            return "does not say where it is"
        if not answer.place:
            return "has come to the end of its script"
        if answer.wait:
            return f"waits for {answer.called or 'values'}" + _at(answer.place)
        return f"is at {answer.place}"


def _have(some: List[Node]) -> str:
    return "has" if len(some) == 1 else "have"


def _at(place: str) -> str:
    return f" ({place})" if place else ""
