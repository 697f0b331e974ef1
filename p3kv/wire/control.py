"""A node's session with the scheduler: small messages over ZeroMQ, in a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any, Deque, List, NoReturn, Optional, Tuple, Type, TypeVar

import zmq
from msgspec import structs

from p3kv.common.log import Reminder
from p3kv.config import Launch, Settings
from p3kv.errors import (
    ConfigError,
    P3Error,
    PeerLostError,
    ProtocolError,
    RendezvousError,
    in_one_line,
)
from p3kv.wire import silence
from p3kv.wire.address import scheduler_address
from p3kv.wire.credentials import Credentials
from p3kv.wire.messages import (
    UNKNOWN,
    Abort,
    Alive,
    CallAwaited,
    Failure,
    FromScheduler,
    Lag,
    Numbers,
    PeerSilent,
    Refused,
    ReportFailure,
    ToScheduler,
    Welcomed,
    decode,
    encode,
)
from p3kv.wire.scheduler_socket import FirstContact, SchedulerSocket, Session, hello
from p3kv.wire.silence import SILENT_HINT, SILENT_S, OwnPauses, Silence, for_so_long

_log = logging.getLogger(__name__)

ALIVE_EVERY_S = 2.0
"""How often a node gives a sign of life, and looks whether the scheduler does."""
_LINGER_S = 3.0
"""How long to wait until the last message has arrived: a Bye, or the reason why the job ends."""
_IN_VAIN_S = 2.0
"""How long to look for a scheduler that will refuse this process."""
_PATIENCE_S = 2.0
"""How long a node that sees a loss waits for the scheduler's verdict on the cause."""

M = TypeVar("M")


class Node(ABC):
    """A process of the job, as its session with the scheduler asks it: in the session's thread."""

    hears: Tuple[type, ...]
    """The messages that go to `hear`; any other is the answer to a request."""

    @abstractmethod
    def hear(self, message: Any) -> Optional[ToScheduler]:
        """Take a message; return the answer, if there is one."""

    @abstractmethod
    def fail_soon(self, error: P3Error) -> None:
        """The job can't go on; called once."""

    @abstractmethod
    def known_round(self) -> int:
        """How far this process has come, or UNKNOWN."""

    @abstractmethod
    def numbers(self) -> Optional[Numbers]:
        """What it has measured, if there is anything."""


class ControlClient:
    """Speaks with the scheduler for this process. All methods may be called from any thread."""

    def __init__(
        self,
        launch: Launch,
        settings: Settings,
        credentials: Credentials,
        listen_address: Tuple[str, int],
        transport: str,
        node: Node,
        neighbourhood: str = "",
    ) -> None:
        self._launch = launch
        self._settings = settings
        self._node = node
        self.slowest: Optional[Lag] = None
        """The worker for which the others wait longest, as the scheduler has told last."""
        self._created_at = time.monotonic()
        self._credentials = credentials
        self._address = f"tcp://{scheduler_address(launch)}"
        self._contact = FirstContact(launch)
        self._outbox: Deque[bytes] = deque()
        self._answers: Deque[Any] = deque()
        self._changed = threading.Condition()
        self._requesting = threading.Lock()
        self._error: Optional[P3Error] = None
        self._session = Session()
        self._welcomed = False
        self._connected = False
        """The scheduler has answered on the connection of now."""
        self._ended_at = 0.0
        self._lost_at: Optional[float] = None
        """When the scheduler is lost if it has not answered again."""
        self._given_up = False
        """No peer will read the messages that are left to send."""
        self._suspicion: Optional[Tuple[float, P3Error]] = None
        self._alive_at: Optional[float] = None
        self._own_pauses = OwnPauses(ALIVE_EVERY_S)
        """When to send the next Alive."""
        self._scheduler = Silence(self._created_at, settings.warn_after_s)
        self._closing = False
        self._close_at: Optional[float] = None
        """When not to wait any longer for what is left to say."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="p3kv-control", daemon=True)
        self._hello = hello(launch, settings, listen_address, transport, neighbourhood)

    def start(self) -> None:
        """Begins to speak with the scheduler."""
        self._thread.start()

    @property
    def not_let_in(self) -> bool:
        """Whether this process will never belong to the job: refused, or nobody has answered, also
        before it left."""
        return not self._welcomed and (self._error is not None or self._closing)

    def send(self, message: ToScheduler) -> None:
        """Sends a message; returns at once."""
        self._outbox.append(encode(message))
        self._wake()

    def wait_until_welcome(self, timeout_s: float) -> None:
        """Returns once the scheduler has answered; RendezvousError if it has not done so
        `timeout_s` after this object was made. Logs now and then what it waits for."""
        wrong = self._launch.wrong_rank
        if wrong is not None:
            # The scheduler says so to all, if there is one. Nothing else is worth waiting for.
            timeout_s = min(timeout_s, _IN_VAIN_S)
        deadline = self._created_at + timeout_s
        reminder = Reminder(self._created_at)
        with self._changed:
            while not self._welcomed:
                self._raise_error()
                now = time.monotonic()
                if now >= deadline:
                    self._given_up = True
                    self._error = ConfigError(wrong) if wrong else self._contact.silence(timeout_s)
                    raise self._error
                if reminder.is_due(now):
                    _log.warning("%s", self._contact.waiting(timeout_s))
                self._changed.wait(min(deadline, reminder.at) - now)

    def wait_for(self, expected: Type[M], waiting_for: Optional[str] = None) -> M:
        """The next answer, which must be of the type `expected`. Waits as long as the job is alive,
        and logs now and then what it waits for. Raises the job's failure."""
        reminder = Reminder(time.monotonic())
        with self._changed:
            while not self._answers:
                self._raise_error()
                if reminder.is_due(time.monotonic()) and waiting_for:
                    _log.warning("still waiting for %s", waiting_for)
                self._changed.wait(reminder.at - time.monotonic())
            answer = self._answers.popleft()
        if not isinstance(answer, expected):
            raise ProtocolError(
                f"the scheduler answered {type(answer).__name__} where {expected} was expected"
            )
        return answer

    def request(
        self, message: ToScheduler, expected: Any, waiting_for: Optional[str] = None
    ) -> Any:
        """Sends a message and waits for its answer, as `wait_for` does."""
        with self._requesting:
            self.send(message)
            return self.wait_for(expected, waiting_for)

    def suspect(self, failure: Failure, second_hand: bool = False) -> None:
        """Reports a loss that this process has seen. It counts as the job's failure unless the
        scheduler names another cause soon.

        Several processes see a loss, and then each other's end. The scheduler decides for all which
        came first. `second_hand`: this process only saw that a connection ended.
        """
        self.send(ReportFailure(failure, second_hand))
        if self._suspicion is None:
            self._suspicion = (time.monotonic() + _PATIENCE_S, failure.to_error())
            self._wake()

    def wait_for_failure(self) -> NoReturn:
        """Raises the job's failure as soon as it is known, after `suspect` in seconds."""
        with self._changed:
            while True:
                self._raise_error()
                self._changed.wait()

    def close(self) -> None:
        """Sends what is waiting and ends the thread; may be called twice."""
        self._closing = True  # whoever is gone then could acknowledge no Alive
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _wake(self) -> None:
        with suppress(OSError):  # closed: nobody waits any more
            self._wake_writer.send(b"\0")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise PeerLostError("the connection to the scheduler is closed")

    def _fail(self, error: P3Error) -> None:
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
        self._node.fail_soon(error)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._serve(context)
        except (zmq.ZMQError, P3Error) as error:
            self._given_up = True
            self._fail(error if isinstance(error, P3Error) else RendezvousError(str(error)))
        except Exception as error:  # noqa: BLE001  nobody else would hear of it
            _log.error("the control thread failed", exc_info=error)
            self._fail(P3Error(f"p3kv failed in its control thread: {in_one_line(error)}"))
        finally:
            context.destroy(0)
            self._wake_reader.close()
            self._wake_writer.close()

    def _new_contact(self, context: zmq.Context) -> SchedulerSocket:
        """A socket that says hello. ZeroMQ would connect the old one again, too, but would not say
        which messages it has lost."""
        self._connected = False
        contact = SchedulerSocket(context, self._credentials, self._address, self._settings)
        contact.send([encode(structs.replace(self._hello, received=self._session.received))])
        return contact

    def _serve(self, context: zmq.Context) -> None:
        contact = self._new_contact(context)
        try:
            while not self._done():
                while self._outbox and self._connected:
                    contact.send(self._session.keep(self._outbox.popleft()))
                messages, events = contact.wait(self._wake_reader, self._timeout_ms())
                for parts in messages:
                    self._take(contact, parts)
                for event, value in events:
                    if self._notice(event, value):
                        contact.close()
                        contact = self._new_contact(context)
                        break
                self._check_clock()
        finally:
            contact.close()

    def _done(self) -> bool:
        """Whether this client is closed and has said all that the scheduler can still hear."""
        if not self._closing:
            return False
        now = time.monotonic()
        if self._close_at is None:
            self._close_at = now + _LINGER_S
        all_said = not self._outbox and self._session.all_arrived
        return all_said or self._given_up or now >= self._close_at

    def _take(self, contact: SchedulerSocket, parts: List[bytes]) -> None:
        """Takes a message: of those without numbers, there is one on each connection."""
        message = self._decoded(parts[0])
        if len(parts) == 2:
            self._session.take(parts[1])
        elif isinstance(message, Welcomed):
            for again in self._session.again(message.received):
                contact.send(again)
            if self._lost_at is not None and self._launch.role == "worker":
                _log.warning("the connection to the scheduler had ended, and there is a new one")
            self._connected, self._lost_at = True, None
        self._receive(message)

    def _timeout_ms(self) -> Optional[int]:
        deadlines = [] if self._suspicion is None else [self._suspicion[0]]
        if self._alive_at is not None and not self._closing:
            deadlines.append(self._alive_at)
        if self._contact.deadline is not None and self._undecided():
            deadlines.append(self._contact.deadline)
        deadlines += [at for at in (self._lost_at, self._close_at) if at is not None]
        if not deadlines:
            return None
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1)

    def _undecided(self) -> bool:
        """Whether the scheduler has not answered yet, and may still."""
        return not self._welcomed and self._error is None

    def _check_clock(self) -> None:
        now = time.monotonic()
        if self._alive_at is not None and now >= self._alive_at and not self._closing:
            self._alive_at = now + ALIVE_EVERY_S
            self._scheduler.leave_out(self._own_pauses.look(now), now)
            self._outbox.append(encode(Alive(self._node.numbers(), round=self._node.known_round())))
            silent_s = self._scheduler.due_s(now)
            if silent_s is not None:
                self._warn_of_scheduler(silent_s)
        if self._suspicion is not None and now >= self._suspicion[0]:
            self._fail(self._suspicion[1])
            self._suspicion = None
        if self._lost_at is not None and now >= self._lost_at:
            self._lost_at, self._given_up = None, True
            self._alive_at = None
            self._scheduler_lost(self._ended_at)
        deadline = self._contact.deadline
        if deadline is not None and now >= deadline and self._undecided():
            self._given_up = True
            self._fail(self._contact.no_answer())

    def _decoded(self, data: bytes) -> FromScheduler:
        try:
            message: FromScheduler = decode(data, FromScheduler)
        except ProtocolError as error:
            if self._undecided():
                raise self._contact.foreign() from error
            raise
        return message

    def _notice(self, event: int, value: int) -> bool:
        """Takes an event of a connection; returns whether a new connection is needed."""
        if self._undecided():
            error = self._contact.event(event, value)
            if error is not None:
                self._given_up = True
                self._fail(error)
        elif event == zmq.EVENT_DISCONNECTED and self._error is not None:
            self._connected, self._given_up = False, True
        elif event == zmq.EVENT_DISCONNECTED:
            if self._lost_at is None:
                now = self._ended_at = time.monotonic()
                timeout_s = self._settings.silence_timeout_s
                self._lost_at = now + self._scheduler.waits_s(now, timeout_s)
            return True
        return False

    def _receive(self, message: FromScheduler) -> None:
        now = time.monotonic()
        silent_s = self._scheduler.heard(now)
        if silent_s is not None:
            self._warn_of_scheduler(silent_s, answers=True)
        if isinstance(message, Alive):
            self.slowest = message.slowest
        elif isinstance(message, PeerSilent):
            self._warn(message)
        elif isinstance(message, CallAwaited):
            _log.warning("%s", message.words)
        elif isinstance(message, Abort):
            self._suspicion = None
            self._fail(message.failure.to_error())
        elif isinstance(message, Refused):
            self._given_up = True
            self._fail(RendezvousError(message.reason))
        elif isinstance(message, Welcomed):
            self._alive_at = now
            if not self._welcomed:
                _log.info("the scheduler has answered")
            with self._changed:
                self._welcomed = True
                self._changed.notify_all()
        elif isinstance(message, self._node.hears):
            answer = self._node.hear(message)
            if answer is not None:
                self.send(answer)
        else:
            with self._changed:
                self._answers.append(message)
                self._changed.notify_all()

    def _warn_of_scheduler(self, silent_s: float, answers: bool = False) -> None:
        self._warn(PeerSilent("the scheduler", silent_s, self._settings.silence_timeout_s, answers))

    def _warn(self, told: PeerSilent) -> None:
        """Only in workers: people read what their scripts say."""
        if self._launch.role == "worker":
            _log.warning("%s", silence.words(told))

    def _scheduler_lost(self, ended_at: float) -> None:
        if self._error is None and not self._closing:
            silent_s = self._scheduler.lasts_s(ended_at)
            reason, hint = "its process ended", "See its own output for why."
            if silent_s >= SILENT_S:
                reason, hint = f"it has not answered for {for_so_long(silent_s)}", SILENT_HINT
            known_round = self._node.known_round()
            failure = Failure(reason, "scheduler", UNKNOWN, known_round, hint=hint)
            self._fail(failure.to_error())
