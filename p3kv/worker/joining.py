"""How a worker joins: it connects to the servers, shakes hands, and agrees on the slice size.
And how it connects again, where the network has ended a link."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from p3kv.common.addresses import endpoint
from p3kv.config import Settings
from p3kv.errors import P3Error, ProtocolError
from p3kv.transport import Link, make_transport
from p3kv.wire.breaks import Breaks
from p3kv.wire.connection import Connection, Handler, Landing, new_memory
from p3kv.wire.credentials import CHALLENGE_BYTES, NONCE_BYTES, Proofs, is_right, nonce
from p3kv.wire.fields import Header, HelloHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import MAGIC, MAX_PROBE_BYTES, URGENT, Kind
from p3kv.wire.loop import Loop
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Agreed,
    DataHello,
    DataWelcome,
    Failure,
    FirstSliceSize,
    JobSettings,
    Measured,
    Ready,
    ReportFailure,
    Roster,
    encode,
)
from p3kv.wire.protocol import FROM_SERVERS, Conversation
from p3kv.worker.job import JobMember

_log = logging.getLogger(__name__)


class _Hello(NamedTuple):
    """Hello of this worker to a server."""

    proofs: Proofs
    nonce: bytes
    words: bytes
    """Words that it says with its proof."""


class Handshakes:
    """The worker's side of `p3kv.wire.credentials`; in its thread, but `begin`, which comes before
    the thread serves a connection."""

    def __init__(self, key: bytes, rank: int, settings: JobSettings) -> None:
        """`key` is the job's (`Credentials.data_key`)."""
        self._key = key
        self._rank = rank
        self._settings = settings
        self._process = secrets.token_bytes(TOKEN_BYTES)
        self._hellos: Dict[Connection, _Hello] = {}

    def begin(self, connection: Connection, server: int, received: int = 0) -> None:
        """Queue a hello to a server; `received`: bytes that came over links that have ended."""
        words = encode(DataHello(self._rank, self._settings, self._process, received))
        said = self._hellos[connection] = _Hello(Proofs(self._key, server), nonce(), words)
        hello = said.nonce + said.proofs.hello(self._rank, said.nonce)
        header = HelloHeader(Kind.HELLO, self._rank, magic=MAGIC, version=PROTOCOL_VERSION)
        connection.writer.push(Frame(URGENT, header, memoryview(hello)))

    def land_challenge(self, connection: Connection, header: Header) -> Landing:
        """Lands a server's challenge."""
        if header.payload_bytes != CHALLENGE_BYTES:
            raise ProtocolError(f"it sent a challenge of {header.payload_bytes} bytes")
        return new_memory(header)

    def answer(self, connection: Connection, header: Header, challenge: memoryview) -> None:
        """Answers a challenge; ProtocolError if it is not of a server of this job."""
        proofs, workers_nonce, words = self._hellos.pop(connection)
        servers_nonce, proof = bytes(challenge[:NONCE_BYTES]), bytes(challenge[NONCE_BYTES:])
        if not is_right(proof, proofs.challenge(self._rank, workers_nonce, servers_nonce)):
            raise ProtocolError(
                "what answers in its place does not know the job's secret. Is its address that of "
                "another program, or of another job?"
            )
        answer = proofs.answer(self._rank, workers_nonce, servers_nonce, words)
        proves = Header(Kind.PROOF, self._rank)
        connection.writer.push(Frame(URGENT, proves, memoryview(answer + words)))

    def forget(self, connection: Connection) -> None:
        """The connection has ended before the handshake was complete."""
        self._hellos.pop(connection, None)


_CONNECT_S = 5.0
_LOOK_EVERY_S = 1.0
_WELCOME_S = 60.0
"""How long to wait for a server's welcome: it first imports what optimizers need."""

_MEASURE_S = 10.0
"""How long measuring may take, besides the time in which a link may be cut. It takes a quarter of a
second, and on the slowest networks as long as a few frames take."""


_SETTLE_S, _PROBE_S = 0.05, 0.2
_FRAMES_AHEAD = 2
_NOTHING = memoryview(bytes(MAX_PROBE_BYTES))


class Probe:
    """Has all servers echo frames for a quarter of a second, and counts the bytes.

    All workers do so at the same time, so that they share links as they will in training.
    Belongs to the worker's thread.
    """

    def __init__(self, rank: int, servers: Mapping[int, Connection]) -> None:
        self._scratch = memoryview(bytearray(MAX_PROBE_BYTES))
        self._header = Header(Kind.PROBE, rank)
        self._servers = servers
        self._sent_s = 0.0
        self._began_s: Optional[float] = None
        self._under_way: Dict[Connection, int] = {}
        """How many frames have left and are not back."""
        self._counted_bytes: Dict[Connection, int] = {}
        self._echoed: Dict[Connection, Tuple[int, float]] = {}
        """How many bytes have come back in all, and until when."""

    def begin(self) -> None:
        """Queues the first frames."""
        self._sent_s = time.monotonic()
        for connection in self._servers.values():
            self._counted_bytes[connection] = self._under_way[connection] = 0
            self._echoed[connection] = (0, self._sent_s)
            for _ in range(_FRAMES_AHEAD):
                self._send(connection)

    @property
    def silent(self) -> List[int]:
        """Ranks of the servers that have not sent all frames back; from any thread."""
        servers = self._servers.items()
        return [rank for rank, connection in servers if self._under_way.get(connection)]

    def land(self, connection: Connection, header: Header) -> Landing:
        """Where an echo's bytes go, which nobody reads; ProtocolError if nothing was sent."""
        if header.payload_bytes != len(self._scratch) or not self._under_way.get(connection):
            raise ProtocolError(f"it sent {header.payload_bytes} bytes back that nobody sent")
        return self._scratch, None

    def take(self, connection: Connection) -> Optional[Measured]:
        """Count an echo and send the next frame; return the measurement when all are back."""
        self._under_way[connection] -= 1
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        self._echoed[connection] = (self._echoed[connection][0] + len(_NOTHING), now_s)
        elapsed_s = now_s - self._began_s
        if elapsed_s < _SETTLE_S + _PROBE_S:
            if elapsed_s >= _SETTLE_S:
                self._counted_bytes[connection] += len(_NOTHING)
            self._send(connection)
        if self.silent:
            return None
        return Measured(self._rate_bytes_s(), self._flows_bytes_s())

    def _send(self, connection: Connection) -> None:
        self._under_way[connection] += 1
        connection.writer.push(Frame(URGENT, self._header, _NOTHING))

    def _rate_bytes_s(self) -> float:
        # The slowest server decides: frames to a server on the worker's own host pass no network.
        return min(self._counted_bytes.values()) * len(self._servers) / _PROBE_S

    def _flows_bytes_s(self) -> Tuple[float, ...]:
        """The rate to each server, by rank, of all frames: a slow network brings few back."""
        echoed = (self._echoed[self._servers[server]] for server in sorted(self._servers))
        return tuple(size / (until_s - self._sent_s) for size, until_s in echoed)


class Joining:
    """Connects this worker to all servers and agrees with the others on the size of slices.

    What `arrivals` and `landings` name belongs to the worker's thread, all else to the thread that
    joins.
    """

    def __init__(
        self,
        job: JobMember,
        settings: Settings,
        roster: Roster,
        handshakes: Handshakes,
        transport_key: bytes,
    ) -> None:
        """`transport_key` is for transports that encrypt (`Credentials.transport_key`)."""
        self._job = job
        self._settings = settings
        self._roster = roster
        self._handshakes = handshakes
        self._transport_key = transport_key
        self.arrivals: Mapping[int, Callable[[Connection, Any, Any], None]] = {
            Kind.CHALLENGE: self._handshakes.answer,
            Kind.WELCOME: self._begin,
            Kind.PROBE: self._take_echo,
        }
        """The frames with which a connection begins, as in `Handler`."""
        self.landings: Mapping[int, Callable[[Connection, Any], Landing]] = {
            Kind.CHALLENGE: self._handshakes.land_challenge,
            Kind.PROBE: self._land_echo,
        }
        self._servers: Dict[int, Connection] = {}
        self._welcomed_by: Set[int] = set()
        self._probe: Optional[Probe] = None
        self._measured: Optional[Measured] = None

    def links(self, place: str) -> Iterator[Tuple[int, Link]]:
        """Connects to all servers: gives the rank of each, and a link to it. `place`: where the
        script is.

        Raises ConfigError when workers have different settings, or a transport is unknown or can't
        be encrypted here, P3Error when a server can't be reached.
        """
        roster, job = self._roster, JobSettings.of(self._settings)
        self._job.control.request(Ready(job, place), Agreed)
        for server, (host, port, _) in enumerate(roster.servers):
            try:
                yield server, self.link(server)
            except OSError as error:
                failure = Failure(
                    f"worker {roster.rank} can't connect to it at {endpoint(host, port)}: "
                    f"{error.strerror or error}",
                    "server",
                    server,
                    hint="Is the address reachable from here? DMLC_INTERFACE or DMLC_NODE_HOST, "
                    "set for the server, choose another.",
                )
                # The server may have ended for a reason that another process knows.
                self._job.control.suspect(failure, second_hand=True)
                self._job.control.wait_for_failure()

    def greet(self, server: int, connection: Connection) -> None:
        """Serves the connection to a server from now on, and says hello."""
        self._servers[server] = connection
        self._job.loop.add_connection(connection)
        self._handshakes.begin(connection, server)
        # At once: a server closes connections that say nothing when there are too many.
        self._job.loop.send_now(connection)

    @property
    def rate_bytes_s(self) -> Optional[float]:
        """How fast this worker can send while all workers do; None if that was not measured."""
        return None if self._measured is None else self._measured.rate_bytes_s

    def link(self, server: int) -> Link:
        """Make a link to a server, from any thread; OSError, or ConfigError for its transport."""
        host, port, transport = self._roster.servers[server]
        member = make_transport(transport, self._settings, self._transport_key)
        return member.connect((host, port), _CONNECT_S)

    def slice_size(self) -> int:
        """The elements of a slice: as set, or as all workers measure the network. Raises P3Error
        when a server does not answer, and the job's failure."""
        return self._settings.slice_size or self._measured_slice_size()

    def _begin(self, connection: Connection, header: Header, welcome: DataWelcome) -> None:
        if welcome.received:
            raise ProtocolError(f"it has received {welcome.received} bytes that nobody sent")
        connection.begin()
        self.welcomed(header.rank)

    def welcomed(self, server: int) -> None:
        """A server serves this worker from now on."""
        with self._job.changed:
            self._welcomed_by.add(server)
            self._job.changed.notify_all()

    def _land_echo(self, connection: Connection, header: Header) -> Landing:
        if self._probe is None:
            raise ProtocolError("it answered a measurement that nobody has begun")
        return self._probe.land(connection, header)

    def _take_echo(self, connection: Connection, header: Header, _: None) -> None:
        assert self._probe is not None
        measured = self._probe.take(connection)
        if measured is not None:
            with self._job.changed:
                self._measured = measured
                self._job.changed.notify_all()

    def wait_for_welcome(self) -> None:
        """Wait until all servers have answered; P3Error when one does not."""
        deadline = time.monotonic() + _WELCOME_S
        servers = self._roster.servers
        with self._job.changed:
            while len(self._welcomed_by) < len(servers):
                self._job.check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    silent = next(s for s in range(len(servers)) if s not in self._welcomed_by)
                    host, port, _ = servers[silent]
                    raise self._blame(
                        silent,
                        f"it did not answer worker {self._roster.rank} at {endpoint(host, port)} "
                        f"within {_WELCOME_S:g} s",
                        "Does its process still run, and is the address its own? DMLC_INTERFACE or "
                        "DMLC_NODE_HOST, set for the server, choose another.",
                    )
                self._job.changed.wait(left_s)

    def _blame(self, server: int, reason: str, hint: str) -> P3Error:
        """Tells all processes why a server can't be reached; returns it as an error."""
        failure = Failure(reason, "server", server, hint=hint)
        self._job.control.send(ReportFailure(failure))
        return failure.to_error()

    def _measured_slice_size(self) -> int:
        self._probe = Probe(self._roster.rank, self._servers)
        self._job.loop.call_soon(self._probe.begin)
        silence_s = self._settings.silence_timeout_s
        deadline = time.monotonic() + _MEASURE_S + silence_s
        with self._job.changed:
            while self._measured is None:
                self._job.check()
                left_s = deadline - time.monotonic()
                if left_s <= 0 and self._probe.silent:
                    raise self._blame(
                        self._probe.silent[0],
                        f"it has not sent back within {_MEASURE_S + silence_s:g} s what worker "
                        f"{self._roster.rank} sent to measure the network",
                        "Small frames have reached it. Does the network between let large packets "
                        "pass (its MTU)? P3KV_SLICE_SIZE has nobody measure.",
                    )
                self._job.changed.wait(max(left_s, _LOOK_EVERY_S))
        answer = self._job.control.request(
            self._measured, FirstSliceSize, "all workers to measure the network"
        )
        _log.info(
            "slices have %d elements: %.0f MB/s leave this worker",
            answer.slice_size, self._measured.rate_bytes_s / 1e6,
        )  # fmt: skip
        return int(answer.slice_size)


_FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 1.0
_WELCOME_AGAIN_S = 10.0
"""A server that has answered once answers soon."""
_HANDSHAKE_BYTES = 1 << 16


class _Attempt(NamedTuple):
    """A handshake on a new link."""

    connection: Connection
    """The one that waits for the link."""
    delay_s: float
    """When to try again, if it fails."""


class Reconnecting(Handler):
    """Gives connections new links, each made in a thread of its own while the worker's thread, to
    which this belongs, serves the others."""

    def __init__(
        self, loop: Loop, handshakes: Handshakes, joining: Joining, breaks: Breaks
    ) -> None:
        self._loop = loop
        self._handshakes = handshakes
        self._joining = joining
        self._breaks = breaks
        self._attempts: Dict[Connection, _Attempt] = {}
        """By the connection that shakes hands."""
        self.arrivals = {Kind.CHALLENGE: handshakes.answer, Kind.WELCOME: self._welcomed}
        self.landings = {Kind.CHALLENGE: handshakes.land_challenge}

    def begin(self, connection: Connection, reason: str, round: int) -> None:
        """A connection's link has ended: makes another, until `breaks` gives the connection up."""
        self._loop.pause_connection(connection)
        connection.drop_link()
        in_vain = self._breaks.begin(connection, reason, round)
        delay_s = min(_FIRST_DELAY_S * 2 ** min(in_vain, 10), LONGEST_DELAY_S)
        self._loop.call_later(delay_s, self._try, connection, delay_s)

    def _try(self, connection: Connection, delay_s: float) -> None:
        if connection in self._breaks:
            thread = threading.Thread(
                target=self._make, args=(connection, delay_s), name="p3kv-connect", daemon=True
            )
            thread.start()

    def _make(self, connection: Connection, delay_s: float) -> None:
        link: Optional[Link] = None
        try:
            assert connection.peer is not None
            link = self._joining.link(connection.peer)
        except OSError:
            pass  # tried again
        finally:
            self._loop.call_soon(self._made, connection, link, delay_s)

    def _made(self, connection: Connection, link: Optional[Link], delay_s: float) -> None:
        if link is None:
            self._try_later(connection, delay_s)
        elif connection not in self._breaks:
            link.close()
        else:
            conversation = Conversation(FROM_SERVERS, "server")
            conversation.peer = connection.peer
            attempt = Connection(link, conversation, self, _HANDSHAKE_BYTES)
            self._attempts[attempt] = _Attempt(connection, delay_s)
            self._loop.add_connection(attempt)
            assert connection.peer is not None
            self._handshakes.begin(attempt, connection.peer, connection.received_bytes)
            self._loop.call_later(_WELCOME_AGAIN_S, self._check, attempt)

    def _try_later(self, connection: Connection, delay_s: float) -> None:
        next_s = min(2 * delay_s, LONGEST_DELAY_S)
        self._loop.call_later(delay_s, self._try, connection, next_s)

    def _check(self, attempt: Connection) -> None:
        if attempt in self._attempts:
            self.lost(attempt, "no welcome")

    def lost(self, connection: Connection, reason: str) -> None:
        self._loop.remove_connection(connection)
        self._handshakes.forget(connection)
        failed = self._attempts.pop(connection, None)
        if failed is not None:
            self._try_later(*failed)

    def _welcomed(self, attempt: Connection, header: Header, welcome: DataWelcome) -> None:
        connection = self._attempts.pop(attempt).connection
        self._loop.pause_connection(attempt)
        link, ahead = attempt.hand_over()
        if connection not in self._breaks:
            link.close()
            return
        begins = not connection.welcome
        connection.take_over(link)
        connection.conversation.go_on()
        self._loop.add_connection(connection)
        self._breaks.reconnected(connection)
        try:
            connection.resume(welcome.received, ahead=ahead)
        except ProtocolError as error:
            connection.handler.lost(connection, str(error))
            return
        if begins:
            assert connection.peer is not None
            self._joining.welcomed(connection.peer)

    def close(self) -> None:
        """The job has failed, or this worker leaves it: no link is made any more."""
        self._breaks.clear()
        for attempt in self._attempts:
            self._loop.remove_connection(attempt)
        self._attempts.clear()
