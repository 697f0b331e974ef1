"""The scheduler process: a ZeroMQ router around the `Job`."""

from __future__ import annotations

import logging
import math
import socket
import time
from typing import Dict, Iterator, Optional, Tuple

import zmq

from p3kv.common.addresses import endpoint
from p3kv.common.log import Reminder
from p3kv.common.terminal import outlive_parent
from p3kv.common.tracing import now_ns
from p3kv.config import Launch, Settings
from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.scheduler.connections import EVENTS, Connections, Door, Sessions
from p3kv.scheduler.job import Job
from p3kv.scheduler.membership import Node, Replies
from p3kv.wire import silence
from p3kv.wire.address import listening_address
from p3kv.wire.credentials import Credentials, Refusals
from p3kv.wire.launcher_link import Cause, FromLauncher, LauncherLink, PartEnded
from p3kv.wire.messages import (
    MAX_TO_SCHEDULER_BYTES,
    UNKNOWN,
    Alive,
    AskReports,
    AskTime,
    Bye,
    Failure,
    Hello,
    PeerSilent,
    Refused,
    TimeTold,
    ToScheduler,
    decode,
)
from p3kv.wire.scheduler_socket import HEARTBEAT_EVERY_MS, heartbeat_timeout_ms
from p3kv.wire.silence import OwnPauses, Silence

LOOK_EVERY_S = 1.0
"""How often `SilentNodes.look` is to be called."""


class SilentNodes:
    """Silent nodes, by their connections. Times are of the monotonic clock."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.silence_timeout_s
        self._warn_after_s = settings.warn_after_s
        self._nodes: Dict[bytes, Tuple[Node, Silence]] = {}
        self._own_pauses = OwnPauses(LOOK_EVERY_S)

    def heard(self, node: Node, now: float) -> Optional[PeerSilent]:
        """Note a message; return what to tell the others of a node that was said to be silent."""
        _, its = self._nodes.setdefault(node.identity, (node, Silence(now, self._warn_after_s)))
        silent_s = its.heard(now)
        return None if silent_s is None else self._words(node, silent_s, answers=True)

    def look(self, now: float) -> Iterator[Tuple[Node, PeerSilent]]:
        """Nodes that are silent for so long that the others are told now."""
        pause_s = self._own_pauses.look(now)
        for node, its in self._nodes.values():
            its.leave_out(pause_s, now)
            silent_s = its.due_s(now)
            if silent_s is not None and not node.gone:
                yield node, self._words(node, silent_s)

    def waits_s(self, identity: bytes, now: float) -> float:
        """How long to wait for a node whose connection has ended now."""
        _, its = self._nodes.get(identity, (None, Silence(now, self._warn_after_s)))
        return its.waits_s(now, self._timeout_s)

    def end(self, node: Node, now: float) -> Optional[float]:
        """How long a node was silent when its connection ended; None if it had ended before."""
        _, its = self._nodes.pop(node.identity, (node, None))
        return None if its is None else its.lasts_s(now)

    def _words(self, node: Node, silent_s: float, answers: bool = False) -> PeerSilent:
        return PeerSilent(node.name(), silent_s, self._timeout_s, answers)


_log = logging.getLogger(__name__)

_LINGER_MS = 1000
_HANDSHAKE_MS = 5000
"""A connection that does not complete ZeroMQ's handshake is closed after this time."""
_BLAME_PATIENCE_S = 0.5
"""How long to wait for a lost node's peers: they know its round, or what it did wrong."""
_FOLLOWED_S = 0.05
"""The same where a script says that it has lost another process, and one is lost: launchers end all
others soon. Servers beside a worker end with it, or shortly before the kernel has closed its
connections."""
_FAREWELL_S = 3.0
"""How long a failed job's nodes get to say Bye."""


def run_scheduler(launch: Launch, settings: Settings) -> None:
    """Serve one job to its end; raise its failure, and ConfigError when the port is taken."""
    link = None if launch.launcher_fd is None else _launchers_end(launch.launcher_fd)
    credentials = Credentials(launch.common_secret)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    # Before anybody can connect, so that no connection goes unnoticed, or unasked.
    monitor = router.get_monitor_socket(EVENTS)
    door = Door(context, credentials)
    credentials.protect_router(router)
    try:
        _bind(router, launch, settings)
        _Scheduler(launch, settings, router, monitor, door, link).serve()
    finally:
        if link is not None:
            link.close()
        router.disable_monitor()
        monitor.close()
        router.close()
        door.close()
        context.term()


def _launchers_end(descriptor: int) -> LauncherLink[FromLauncher]:
    try:
        return LauncherLink(socket.socket(fileno=descriptor), FromLauncher)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"P3KV_LAUNCHER_FD is {descriptor}, which is no socket here: {error}. Unset "
            "it: 'p3kv launch' sets it for its own scheduler."
        ) from error


def _bind(router: zmq.Socket, launch: Launch, settings: Settings) -> None:
    router.setsockopt(zmq.LINGER, _LINGER_MS)
    router.setsockopt(zmq.IPV6, 1)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_TO_SCHEDULER_BYTES)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_EVERY_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms(settings))
    if launch.scheduler_fd is not None:
        router.setsockopt(zmq.USE_FD, launch.scheduler_fd)
    address = endpoint(listening_address(launch), launch.root_port)
    try:
        router.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"the scheduler's port is in use: {address}. Choose another "
                f"{launch.variables.port} ('p3kv launch' finds a free one), or end the process "
                "that holds it, perhaps the scheduler of an earlier run."
            ) from error
        raise ConfigError(
            f"the scheduler can't listen at {address}: {error}. {launch.variables.host} must be an "
            "address of the host on which the scheduler runs."
        ) from error


class _Scheduler:
    def __init__(
        self,
        launch: Launch,
        settings: Settings,
        router: zmq.Socket,
        monitor: zmq.Socket,
        door: Door,
        link: Optional[LauncherLink[FromLauncher]],
    ) -> None:
        self._job = Job(launch.job, launch.num_workers, launch.num_servers, launch.variables)
        self._settings = settings
        self._router = router
        self._monitor = monitor
        self._door = door
        self._refusals = Refusals(_log)
        self._connections = Connections(
            monitor, launch.num_workers + launch.num_servers, self._refusals, bool(launch.secret)
        )
        self._last_arrival = time.monotonic()
        self._reminder = Reminder(self._last_arrival)
        self._link = link
        self._sessions = Sessions(router)
        self._silences = SilentNodes(settings)
        self._look_at = self._last_arrival
        self._judge_at: Optional[float] = None
        self._farewell_deadline: Optional[float] = None

    def serve(self) -> None:
        """Serves the job to its end; raises its failure."""
        try:
            self._serve()
        except Exception as error:
            reason = f"p3kv failed in the scheduler: {in_one_line(error)}"
            failure = Failure(reason, "scheduler", UNKNOWN, error="P3Error")
            self._send(self._job.fail(failure))
            self._tell_launcher(failure)
            raise
        if self._job.failure is not None:
            raise self._job.failure.to_error()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._door.socket, zmq.POLLIN)
        if self._link is not None:
            poller.register(self._link.fileno(), zmq.POLLIN)
        while not self._over():
            ready = dict(poller.poll(self._timeout_ms()))
            if self._door.socket in ready:
                self._door.answer()
            if self._router in ready:
                self._receive()
            if self._monitor in ready:
                self._notice_connections()
            if self._link is not None and self._link.fileno() in ready and not self._hear_ends():
                poller.unregister(self._link.fileno())
                self._link = None
            self._check_clock()

    def _over(self) -> bool:
        if self._job.ended:
            return True
        deadline = self._farewell_deadline
        return deadline is not None and time.monotonic() >= deadline

    def _timeout_ms(self) -> int:
        deadlines = [self._look_at]
        if self._sessions.gives_up_at is not None:
            deadlines.append(self._sessions.gives_up_at)
        if self._judge_at is not None:
            deadlines.append(self._judge_at)
        if self._farewell_deadline is not None:
            deadlines.append(self._farewell_deadline)
        elif not self._job.assembled:
            give_up_at = self._last_arrival + self._settings.rendezvous_timeout_s
            deadlines += [give_up_at, self._reminder.at]
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1)

    def _notice_connections(self) -> None:
        for connection in self._connections.notice():
            self._disconnected(connection)

    def _receive(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        received_ns = now_ns()
        connection = frames[0].bytes
        identity = self._sessions.node(connection)
        if identity is None and len(frames) == 3:
            return  # of a node that has another connection now, where it comes again
        try:
            if len(frames) != (2 if identity is None else 3):
                raise ProtocolError(f"a message has {len(frames)} parts")
            message: ToScheduler = decode(frames[1].buffer, ToScheduler)
            if identity is not None:
                self._sessions.take(connection, frames[2].buffer)
        except ProtocolError as error:
            self._misunderstood(identity, error)
            return
        if identity is None:
            self._meet(connection, message, frames[1].get(zmq.SRCFD))
        elif isinstance(message, AskTime):
            self._send([(identity, TimeTold(message.asked_ns, received_ns, now_ns()))])
            self._heard(identity)
        else:
            self._heed(identity, message)

    def _meet(self, connection: bytes, message: ToScheduler, descriptor: int) -> None:
        """A process that knows the job's secret, and is no node yet."""
        if isinstance(message, Hello):
            self._hello(connection, message, descriptor)
        elif isinstance(message, AskReports):
            for _, answer in self._job.handle(connection, message):
                self._sessions.answer(connection, answer)
        else:
            self._sessions.answer(connection, Refused("say Hello first"))

    def _heed(self, identity: bytes, message: ToScheduler) -> None:
        self._send(self._job.handle(identity, message))
        shifted = self._job.shifted_names()
        if shifted is not None:
            _log.warning("%s", shifted)
        if isinstance(message, Bye):
            outlive_parent()  # which may be this worker; others may go on
            self._send([(identity, Alive())])  # shows that it has come: it is the last message
        self._heard(identity)

    def _heard(self, identity: bytes) -> None:
        node = self._job.node(identity)
        if node is not None:
            self._tell(node, self._silences.heard(node, time.monotonic()))

    def _hello(self, connection: bytes, hello: Hello, descriptor: int) -> None:
        identity = hello.process or connection
        try:
            knows = self._sessions.resume(identity, connection, hello.received)
        except ProtocolError as error:
            self._misunderstood(identity, error)
            return
        if not knows:
            self._sessions.begin(identity, connection)
            replies = self._job.handle(identity, hello)
            self._note_refusal(hello, replies)
            self._send(replies)
            self._heard(identity)
        node = self._job.node(identity)
        if node is None:
            self._sessions.forget(identity)
            return
        if knows:
            _log.warning("%s has a new connection to the scheduler", node.name())
        else:
            self._last_arrival = time.monotonic()
            self._reminder.postpone(self._last_arrival)
            _log.info("here is %s", node.name())
            if self._job.assembled:
                self._tell_of_servers()
        self._arrived(connection, descriptor)

    def _note_refusal(self, hello: Hello, replies: Replies) -> None:
        """Log why a process that knows the job's secret is refused: the others wait for one like
        it."""
        for _, message in replies:
            if isinstance(message, Refused):
                who = f"the {hello.role} on {hello.host}, process {hello.pid}"
                self._refusals.note(f"{who}: {message.reason}")

    def _tell_of_servers(self) -> None:
        """Warns, once in a job, where more servers would make it faster."""
        words = self._job.too_few_servers()
        if words is not None:
            _log.warning("%s", words)

    def _misunderstood(self, identity: Optional[bytes], error: ProtocolError) -> None:
        node = None if identity is None else self._job.node(identity)
        if node is not None and not node.gone:
            self._send(self._job.wrong_words(node, error))
            return
        # It knows the secret, but has not joined the job: it gets no answer and does no harm.
        self._refusals.note(f"a process that knows the job's secret did not say hello: {error}")

    def _arrived(self, connection: bytes, descriptor: int) -> None:
        """Note a node's connection."""
        self._notice_connections()
        if not self._connections.is_of(descriptor, connection):
            self._disconnected(connection)

    def _disconnected(self, connection: bytes) -> None:
        """Note that a connection has ended. Its process may still live and come back, unless the
        launcher says that it has ended."""
        identity, now = self._sessions.node(connection), time.monotonic()
        if identity is not None:
            node = self._job.node(identity)
            is_over = self._job.failure is not None or (node is not None and node.gone)
            waits_s = 0.0 if is_over else self._silences.waits_s(identity, now)
            self._sessions.ended(connection, now, waits_s)

    def _lost(self, identity: bytes, ended_at: float) -> None:
        node = self._job.node(identity)
        silent_s = None if node is None else self._silences.end(node, ended_at)
        if node is not None and silent_s is not None:
            self._job.lost(node, silent_s)

    def _tell(self, node: Node, told: Optional[PeerSilent]) -> None:
        """Warns here and in all other processes that a node is silent, or answers again."""
        if told is not None:
            _log.warning("%s", silence.words(told))
            self._send(self._job.tell_others(node, told))

    def _hear_ends(self) -> bool:
        """Take the launcher's reports of its processes; False if it reports no more."""
        assert self._link is not None
        told = self._link.receive()
        for event in told:
            if isinstance(event, PartEnded):
                self._job.process_ended(event)
            else:
                self._send(self._job.stops())
        return bool(told)

    def _check_clock(self) -> None:
        now = time.monotonic()
        nobody_returns = self._job.failure is not None or self._job.has_followers
        for identity, ended_at in self._sessions.lost(math.inf if nobody_returns else now):
            self._lost(identity, ended_at)
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            for node, told in self._silences.look(now):
                self._tell(node, told)
            self._send(self._job.look(now, self._settings.warn_after_s))
        if not self._job.undecided:
            self._judge_at = None
        elif self._judge_at is not None and now >= self._judge_at:
            self._judge_at = None
            self._send(self._job.judge())
        else:
            patience_s = _FOLLOWED_S if self._job.knows_followed else _BLAME_PATIENCE_S
            self._judge_at = min(self._judge_at or math.inf, now + patience_s)
        arriving = not self._job.assembled and self._job.failure is None
        timeout_s = self._settings.rendezvous_timeout_s
        if arriving and now >= self._last_arrival + timeout_s:
            self._send(self._job.nobody_else_came(timeout_s))
        elif arriving and self._reminder.is_due(now):
            _log.warning("%s", self._job.who_came())
        if self._job.failure is not None and self._farewell_deadline is None:
            self._farewell_deadline = now + _FAREWELL_S
            self._tell_launcher(self._job.failure)

    def _tell_launcher(self, failure: Failure) -> None:
        """Tells the launcher why the job fails, and which processes can't be told."""
        if self._link is None:
            return
        part, sentence = failure.role, f"the job failed: {failure.words}"
        if failure.role != "scheduler":
            part = f"{failure.role} {failure.rank}"
            sentence = f"{failure.where} failed first: {failure.words}"
        self._link.send(Cause(part, sentence, self._job.unreached()))

    def _send(self, replies: Replies) -> None:
        for identity, message in replies:
            self._sessions.send(identity, message)
