"""Starts a job's processes, watches them, and leaves none behind."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO, Iterator, NamedTuple, Sequence, Union

from p3kv.processes.launcher.guardian import Guardian, group_is_alive, signal_group
from p3kv.processes.launcher.output import Forwarder, Screen, unbuffered
from p3kv.processes.launcher.process import (
    CannotStart,
    JobPart,
    RunningPart,
    check_commands,
    signal_name,
    started,
)
from p3kv.wire.launcher_link import Cause, LauncherLink, PartEnded, StopPassedOn

_LAST_WORDS_S = 1.0
"""How long to wait for words of a scheduler that has ended; they are there already."""
_GROUP_POLL_S = 0.05
_SCHEDULER = "scheduler"
_STORELESS = "; does every worker import p3kv?"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Graces:
    """How long the launcher waits, in seconds, before it goes on to the next measure.

    `others_s`: after a part failed, for the others to end by themselves; the store tells them the
    cause, and their own messages are worth having. `scheduler_s`: for a scheduler that has told no
    cause, after all others have ended. `serving_s`: after the workers ended well, for the parts
    that serve them. `stop_s`: after a signal was passed on to the workers, for what they save.
    `term_s`: between SIGTERM and SIGKILL. `kill_s`: for the kernel to remove what was killed.
    """

    others_s: float = 9.0
    scheduler_s: float = 4.0
    serving_s: float = 10.0
    stop_s: float = 30.0
    term_s: float = 5.0
    kill_s: float = 5.0


class _Verdict(NamedTuple):
    code: int
    sentence: str
    by_end: bool = False  # A part's end shows no more than that it ended: the scheduler knows why.


class _Ended(NamedTuple):
    number: int


class _Signalled(NamedTuple):
    signum: int


_Event = Union[_Ended, _Signalled, Cause]


class Launcher:
    """Runs parts as one job: all of them, or none.

    `run` may be called once, in the main thread if signals shall end the job. `out` and `err` are
    where the parts' output goes; `handed_over` are sockets that parts inherit.

    On `link` the launcher tells the scheduler of every end, and the scheduler tells why the job
    failed. After an exception Python takes longer to end than the store takes to tell the others.
    So the first process to end is often not the first that failed.
    """

    def __init__(
        self,
        parts: Sequence[JobPart],
        *,
        out: BinaryIO | None = None,
        err: BinaryIO | None = None,
        graces: Graces | None = None,
        handed_over: Sequence[socket.socket] = (),
        link: LauncherLink[Cause] | None = None,
    ) -> None:
        self._parts = list(parts)
        self._graces = graces or Graces()
        self._handed_over = handed_over
        self._link = link
        self._listener: threading.Thread | None = None
        self._cause: Cause | None = None
        # SimpleQueue's put may interrupt its own get, as a signal handler does.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._screen = Screen(out or unbuffered(sys.stdout), err or unbuffered(sys.stderr))
        # The process whose reader is gone gets SIGPIPE; so does the job.
        self._forwarder = Forwarder(
            self._screen, lambda: self._events.put(_Signalled(signal.SIGPIPE))
        )
        self._guardian = Guardian(self._graces.term_s)
        self._running: list[RunningPart] = []
        self._verdict: _Verdict | None = None
        self._term_at_s: float | None = None
        self._is_terminating = False
        self._is_stopped = False
        """Whether the launcher has got a signal to end."""
        self._ended_by_us: set[str] = set()
        self._left: list[str] = []
        """Parts that had to be ended, though they had been told or had had the time to end."""

    def run(self) -> int:
        """Run the parts to their end; return 0, or the first failure's exit code. Nothing of their
        process groups is left then, and a line on `err` says which part failed first."""
        try:
            with self._signals_as_events():
                if self._start():
                    # Now the parts have them alone: with a second copy of the scheduler's listener
                    # here, connections to a dead scheduler would be accepted and never answered.
                    for one in self._handed_over:
                        one.close()
                self._watch()
        finally:
            # Only an error in the launcher itself leaves something to end here.
            for running in self._running:
                if not running.is_over:
                    signal_group(running.group, signal.SIGKILL)
            self._guardian.close()
            self._forwarder.close()
            self._screen.say_what_is_folded()
        verdict = self._final_verdict()
        if verdict is None:
            return 0
        ended = f"; ended {', '.join(self._left)}" if self._left else ""
        self._screen.say(f"p3kv launch: {verdict.sentence}{ended}")
        return verdict.code

    @contextlib.contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        def on_signal(signum: int, frame: object) -> None:
            self._events.put(_Signalled(signum))

        before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                # Who starts a program with a signal ignored (nohup, a shell's &) means it.
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, on_signal)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @property
    def a_part_failed(self) -> bool:
        """After `run`: whether a part failed, and the launcher was not stopped and could start
        all."""
        failed = self._cause is not None if self._verdict is None else self._verdict.by_end
        return failed and not self._is_stopped

    # ---- starting

    def _start(self) -> bool:
        width = max(len(part.name) for part in self._parts)
        try:
            check_commands(self._parts)
            self._guardian.start()
            for colour, running in enumerate(started(self._parts, self._guardian.announce)):
                self._running.append(running)
                name = running.part.name.ljust(width)
                if running.out is not None:
                    self._forwarder.add(running.out, False, name, colour)
                self._forwarder.add(running.err, True, name, colour)
        except CannotStart as problem:
            self._verdict = _Verdict(problem.code, str(problem))
            self._set_term_at(0.0)
            if not self._running:
                return False
        # Threads come after the last fork: a child must not inherit a lock that one of them holds.
        self._forwarder.start()
        for index, running in enumerate(self._running):
            threading.Thread(
                target=self._report_end,
                args=(index, running),
                name=f"p3kv-launch-watch-{running.part.name}",
                daemon=True,
            ).start()
        if self._link is not None:
            self._listener = threading.Thread(
                target=self._listen, args=(self._link,), name="p3kv-launch-cause", daemon=True
            )
            self._listener.start()
        return self._verdict is None

    def _listen(self, link: LauncherLink[Cause]) -> None:
        while told := link.receive():
            for cause in told:
                self._events.put(cause)

    def _report_end(self, index: int, running: RunningPart) -> None:
        # A blocking wait for each process: of two that end close together, the first is reported
        # first. Polling could not tell which was first.
        running.wait_unreaped()
        self._events.put(_Ended(index))

    # ---- watching

    def _watch(self) -> None:
        while not all(running.is_over for running in self._running):
            try:
                event: _Event | None = self._events.get(timeout=self._timeout_s())
            except queue.Empty:
                event = None
            if isinstance(event, _Ended):
                self._on_end(self._running[event.number])
            elif isinstance(event, _Signalled):
                self._on_signal(event.signum)
            elif isinstance(event, Cause):
                self._on_cause(event)
            self._take_due_measures()

    def _timeout_s(self) -> float | None:
        going = [running for running in self._running if not running.is_over]
        due_s = [running.due_s for running in going if running.due_s is not None]
        if self._term_at_s is not None and not self._is_terminating:
            due_s.append(self._term_at_s)
        timeouts_s = [max(0.0, at_s - time.monotonic()) for at_s in due_s]
        if any(running.code is not None for running in going):
            # A process that a leader left behind is not our child: poll for its end.
            timeouts_s.append(_GROUP_POLL_S)
        return min(timeouts_s) if timeouts_s else None

    def _on_end(self, running: RunningPart) -> None:
        # Processes that a part leaves in its group end with it. The signal comes before `reap`:
        # until then the group's number cannot belong to another group.
        running.terminate(self._graces.term_s)
        running.reap()
        name, code = running.part.name, running.code
        assert code is not None
        if self._link is not None and not self._is_terminating and name not in self._ended_by_us:
            role, _, rank = name.partition(" ")
            if rank:
                self._link.send(PartEnded(role, int(rank), code, running.signal))
        if code != 0:
            if self._verdict is None and name not in self._ended_by_us:
                self._verdict = _failure(running)
                if self._workers_ended_well():
                    hint = f"{self._verdict.sentence}, after the workers ended well{_STORELESS}"
                    self._verdict = self._verdict._replace(sentence=hint)
                self._set_term_at(self._graces.others_s)
        elif self._workers_ended_well():
            self._set_term_at(self._graces.serving_s)
        if self._is_stopped and all(one.code is not None for one in self._workers):
            # Those that ended well have left the job, which then ends in order.
            self._set_term_at(self._graces.serving_s if self._workers_ended_well() else 0.0)
        self._end_a_mute_scheduler()

    def _on_cause(self, cause: Cause) -> None:
        self._cause = cause
        if not self._is_stopped:  # or others still save
            self._set_term_at(self._graces.others_s)
        for running in self._running:
            if running.code is None and running.part.name in cause.unreached:
                self._ended_by_us.add(running.part.name)
                running.terminate(self._graces.term_s)

    def _end_a_mute_scheduler(self) -> None:
        """Waits less for a scheduler that alone is left and has not said why the others failed."""
        left = [running.part.name for running in self._running if running.code is None]
        if left == [_SCHEDULER] and self._link and self._verdict and not self._cause:
            self._set_term_at(self._graces.scheduler_s)

    def _on_signal(self, signum: int) -> None:
        if self._verdict is None:
            self._verdict = _Verdict(128 + signum, f"stopped by {signal_name(signum)}")
        working = [one for one in self._workers if one.code is None]
        if self._is_stopped:
            # Asked a second time while the parts take their time to end.
            for running in self._running:
                running.hurry()
        if self._is_stopped or self._is_terminating or signum == signal.SIGPIPE or not working:
            self._set_term_at(0.0)
        else:
            # What serves them goes on meanwhile: a script may need it for what it saves.
            if self._link is not None:
                self._link.send(StopPassedOn())
            for running in working:
                running.pass_on(signum)
            self._set_term_at(self._graces.stop_s)
            self._screen.say(
                f"p3kv launch: has passed {signal_name(signum)} on to the scripts, which have "
                f"{self._graces.stop_s:g} s to end (P3KV_STOP_TIMEOUT_S); another one ends them "
                "at once"
            )
        self._is_stopped = True

    @property
    def _workers(self) -> list[RunningPart]:
        return [one for one in self._running if not one.part.serves_workers]

    def _workers_ended_well(self) -> bool:
        return all(one.code == 0 for one in self._workers)

    def _set_term_at(self, delay_s: float) -> None:
        at_s = time.monotonic() + delay_s
        self._term_at_s = at_s if self._term_at_s is None else min(at_s, self._term_at_s)

    def _take_due_measures(self) -> None:
        now_s = time.monotonic()
        if self._term_at_s is not None and now_s >= self._term_at_s and not self._is_terminating:
            self._is_terminating = True
            left = [running for running in self._running if running.code is None]
            names = [running.part.name for running in left]
            self._left = [name for name in names if name not in self._ended_by_us]
            self._ended_by_us.update(names)
            if left and self._verdict is None and self._cause is None:
                self._verdict = _Verdict(
                    1,
                    "the workers ended well, but what serves them still waited "
                    f"{self._graces.serving_s:g} s later{_STORELESS}",
                )
            # Workers first: they would complain of the end of what serves them.
            for running in sorted(left, key=lambda one: one.part.serves_workers):
                running.terminate(self._graces.term_s)
        for running in self._running:
            if running.is_over:
                continue
            running.take_due_measure(now_s, self._graces.kill_s)
            if running.is_over:
                name = running.part.name
                self._screen.say(f"p3kv launch: {name} ({running.whereabouts}) stays")
            elif running.code is not None and not group_is_alive(running.group):
                running.is_over = True
                # From now on the number may become anybody's.
                self._guardian.forget(running.group)

    def _final_verdict(self) -> _Verdict | None:
        self._hear_the_rest()
        verdict, cause = self._verdict, self._cause
        if verdict is not None and not verdict.by_end:
            return verdict
        if cause is not None:
            # One that did not fail by itself has no exit code of its own to give.
            code = 1
            for running in self._running:
                name = running.part.name
                if name == cause.part and name not in self._ended_by_us and running.code:
                    code = running.code
            return _Verdict(code, cause.sentence)
        if verdict is not None and self._link is not None and _SCHEDULER in self._left:
            return _Verdict(verdict.code, f"{_SCHEDULER} failed first: it answered nobody any more")
        return verdict

    def _hear_the_rest(self) -> None:
        if self._listener is not None:
            self._listener.join(_LAST_WORDS_S)
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Cause):
                    self._cause = event


def _failure(running: RunningPart) -> _Verdict:
    assert running.code is not None
    return _Verdict(running.code, f"{running.part.name} failed first: {running.how}", by_end=True)
