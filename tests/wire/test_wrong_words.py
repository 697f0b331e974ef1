"""A member of the job that says what the protocol does not allow: it is named with the reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import msgspec
import pytest
import zmq

from p3kv.common.version import VERSION
from p3kv.transport import Tcp
from p3kv.wire.credentials import CHALLENGE_BYTES, Credentials
from p3kv.wire.fields import PullRowsHeader
from p3kv.wire.header import ENCODED, INITIAL_ROUND, Kind
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Abort,
    Agreed,
    Bye,
    Failure,
    FromScheduler,
    Hello,
    JobSettings,
    Ready,
    ReportFailure,
    Roster,
    decode,
    encode,
)
from p3kv.wire.protocol import FROM_SERVERS, FROM_WORKERS, Phase
from p3kv.wire.scheduler_socket import Session
from tests.jobs import SCRIPTS, SECRET, end, held_port, output_of, start_role
from tests.served import (
    TOLD_S,
    Served,
    Serving,
    frame,
    hello,
    packed,
    received,
    shake_hands,
    welcome,
)

JOIN = [sys.executable, str(SCRIPTS / "join.py")]
NO_TEXT = b"\x81\xa4type\xa5\xff\xff\xff\xff\xff"


def nested(kind: str) -> bytes:
    """A message with an unknown field that no reader can follow to its end."""
    return msgspec.msgpack.encode({"type": kind, "more": 0})[:-1] + b"\x91" * 3500


def raw(kind: str, **fields: object) -> bytes:
    """A message with any values in it."""
    return msgspec.msgpack.encode({"type": kind, **fields})


# What workers say to a server.

SLICE_SIZE = 100


def slices(rank: int, size: int = SLICE_SIZE, round: int = INITIAL_ROUND) -> bytes:
    return frame(Kind.SLICE_SIZES, rank, raw("Terms", slice_size=size), from_round=round)


def key(rank: int, **changes: object) -> bytes:
    """Slices have a size, and a key of the worker's own is made known, with changes."""
    fields = {
        "key_id": rank, "key": rank, "shape": [25, 10], "dtype": "float32", "runs": [(0, 250)],
        **changes,
    }  # fmt: skip
    return slices(rank) + frame(Kind.KEY, rank, raw("DeclaredKey", **fields))


TO_A_SERVER: Dict[str, Tuple[Callable[[int], bytes], str]] = {
    "an order that is none": (lambda rank: frame(Kind.ORDER, rank, NO_TEXT), "not what the prot"),
    "a key without text": (lambda rank: frame(Kind.KEY, rank, NO_TEXT), "not what the protocol"),
    "a nested key": (
        lambda rank: slices(rank) + frame(Kind.KEY, rank, nested("DeclaredKey")),
        "not what the protocol",
    ),
    "a dtype": (lambda rank: key(rank, dtype="nonsense"), "dtype 'nonsense'"),
    "an object's dtype": (lambda rank: key(rank, dtype="O"), "dtype 'O'"),
    "too many elements": (lambda rank: key(rank, shape=[2**40], runs=[(0, 2**40)]), "at most"),
    "too many slices": (
        lambda rank: key(rank, shape=[2**32], runs=[(0, 2**32)]),
        "42949673 slices",
    ),
    "too many runs": (lambda rank: key(rank, runs=[(0, 1)] * 2), "runs"),
    "another shape": (lambda rank: key(rank, runs=[(0, 240)]), "for the shape (25, 10)"),
    "fewer than no elements": (lambda rank: key(rank, runs=[(0, -5)]), "-5 elements"),
    "another server's key": (lambda rank: key(rank, runs=[(1, 250)]), "server 0 keeps nothing"),
    "a huge key id": (lambda rank: key(rank, key_id=2**40), str(2**40)),
    "slices of 2^32-1 elements": (lambda rank: slices(rank, 2**32 - 1), "a slice is 4294967295,"),
    "slices of no elements": (lambda rank: slices(rank, 0), "a slice is 0,"),
    "a slice that is not there": (
        lambda rank: key(rank) + frame(Kind.PUSH, rank, bytes(4), key=rank, slice=3, round=1),
        "no slice 3",
    ),
    "a slice of another size": (
        lambda rank: key(rank) + frame(Kind.PUSH, rank, bytes(4), key=rank, round=1),
        "4 bytes",
    ),
    "a slice of a key that is not there": (
        lambda rank: frame(Kind.PUSH, rank, bytes(4), key=2**32 - 1, round=1),
        "unknown here",
    ),
    "a wish for states of a key that is not there": (
        lambda rank: frame(Kind.STATES, rank, key=2**32 - 1),
        "unknown here",
    ),
    "a state that only worker 0 may load": (
        lambda rank: key(rank) + frame(Kind.STATE, rank, b"?", key=rank),
        "only worker 0",
    ),
    "a part of a checkpoint for which nobody has asked": (
        lambda rank: frame(Kind.WRITTEN, rank, raw("Written", step=3, problem="")),
        "for which nobody has asked",
    ),
    "a kind that is none": (
        lambda rank: packed(255, rank, 2**32 - 1),
        "kind 255",
    ),
    "another worker's slice": (lambda rank: slices(rank + 1), "a frame of worker"),
}  # fmt: skip
OF_RANK_0 = ("an order that is none",)
"""What nobody else may say at all."""

# What no worker may say, or not then, or not so much of it.
TO_A_SERVER.update(
    {
        "a second hello": (hello, "kind HELLO, which must not come from a worker now"),
        "words after its goodbye": (
            lambda rank: frame(Kind.BYE, rank) + slices(rank),
            "kind SLICE_SIZES, which must not come after its goodbye",
        ),
        "a pull with a flag of other kinds": (
            lambda rank: key(rank) + frame(Kind.PULL, rank, flags=PullRowsHeader.NAMED, key=rank),
            "kind PULL with the flags 0x08, which it does not have",
        ),
        "a second goodbye": (
            lambda rank: frame(Kind.BYE, rank) * 2,
            "kind BYE, which must not come after its goodbye",
        ),
        **{
            f"rank 0's {kind.name}": (
                partial(frame, kind),
                f"kind {kind.name}, which only worker 0 may send",
            )
            for kind in (
                Kind.OPTIMIZER,
                Kind.ORDER,
                Kind.CLIPPED,
                Kind.STEP_PUSHED,
                Kind.SCALE,
                Kind.NORM,
                Kind.CHECKPOINT,
                Kind.RESUMED,
            )
        },
        **{
            f"a server's {kind.name}": (
                partial(frame, kind),
                f"kind {kind.name}, which must not come from a worker now",
            )
            for kind in set(Kind) - {*FROM_WORKERS[Phase.OPEN], Kind.HELLO, Kind.ACK}
        },
        **{
            f"too long a {kind.name}": (
                partial(packed, kind, payload_bytes=most + 1),
                f"kind {kind.name} with {most + 1} bytes; it has {most} at most",
            )
            for kind, (most, _, only_rank_0, *_) in FROM_WORKERS[Phase.OPEN].items()
            if not only_rank_0
        },
    }
)


def test_a_server_says_what_each_worker_said_wrongly_and_ends_its_connection() -> None:
    names = sorted(TO_A_SERVER, key=lambda name: name not in OF_RANK_0)
    served = Served(len(names) + 2)
    workers: List[socket.socket] = []
    try:
        address = served.welcome()
        for rank in range(len(names)):
            workers.append(socket.create_connection(address, timeout=TOLD_S))
            shake_hands(workers[rank], rank)
            assert received(workers[rank])[0].kind == Kind.WELCOME
        workers.append(socket.create_connection(address, timeout=TOLD_S))
        shake_hands(workers[-1], len(names), deterministic=True)
        for rank, name in enumerate(names):
            workers[rank].sendall(TO_A_SERVER[name][0](rank))
        told: Dict[int, str] = {}
        while len(told) < len(workers):
            report = served.hear()
            assert isinstance(report, ReportFailure), report
            told[report.failure.rank] = report.failure.reason
        for rank, name in enumerate(names):
            assert TO_A_SERVER[name][1] in told[rank], f"{name}: {told[rank]}"
        assert "it has deterministic=True, unlike the others" in told[len(names)]
        # A layout may be missing on the server only, so no worker is to blame.
        rank = len(workers)
        workers.append(socket.create_connection(address, timeout=TOLD_S))
        shake_hands(workers[-1], rank)
        assert received(workers[-1])[0].kind == Kind.WELCOME
        workers[-1].sendall(key(rank, layout="columns"))
        report = served.hear()
        assert isinstance(report, ReportFailure), report
        assert (report.failure.role, report.failure.error) == ("server", "ConfigError")
        known = "only bucket, dense, sparse_rows, touched_rows. Set P3KV_PLUGINS"
        assert f"no layout 'columns', {known}" in report.failure.reason
        served.say(Abort(Failure("the test is done.", "worker", 0)))
        output = output_of(served.process, TOLD_S)
        assert output is not None and "Traceback" not in output, output
        assert served.process.returncode == 1
    finally:
        for worker in workers:
            worker.close()
        served.close()


# What servers say to a worker.

TO_A_WORKER: Dict[str, Tuple[Callable[[int], bytes], str]] = {
    "noise": (lambda rank: packed(255, rank) * 9, "kind 255, which must not come before the"),
    "words before the welcome": (partial(frame, Kind.BYE), "kind BYE, which must not come before"),
    "a second challenge": (
        lambda rank: frame(Kind.CHALLENGE, rank, bytes(CHALLENGE_BYTES)),
        "kind CHALLENGE, which must not come before the welcome",
    ),
}
WELCOMED: Dict[str, Tuple[Callable[[int], bytes], str]] = {
    "a kind that is none": (partial(packed, 255), "kind 255, which must not come from a s"),
    "a goodbye that nobody asked for": (partial(frame, Kind.BYE), "goodbye before this worker did"),
    "an echo of nothing": (
        lambda rank: frame(Kind.PROBE, rank, bytes(9)),
        "a measurement that nobody has begun",
    ),
    "an order that is none": (
        lambda rank: frame(Kind.ORDER, rank, NO_TEXT), "not what the protocol allows"
    ),
    "a stall that is none": (
        lambda rank: frame(Kind.STALLED, rank, NO_TEXT), "not what the protocol allows"
    ),
    "slices of no elements": (lambda rank: slices(rank, 0), "a slice is 0,"),
    "other slices": (
        lambda rank: slices(rank, round=4) + slices(rank, 7, round=4),
        "slice_size=7, credit_size=None) from round 4",
    ),
    "the first slices": (slices, "from round 0 on, which each worker knows already"),
    "another server's words": (lambda rank: slices(rank + 1), "sent a frame of server"),
    "an end with a flag of other kinds": (
        partial(frame, Kind.ENDED, flags=ENCODED),
        "kind ENDED with the flags 0x02, which it does not have",
    ),
    "the end of a round that nobody waits for": (partial(frame, Kind.ENDED), "key 0"),
    "squares of a step that nobody clips": (
        lambda rank: frame(Kind.SQUARES, rank, raw("Squares", parts=[1.0]), step=3),
        "squares of step 3",
    ),
    "a checkpoint for which nobody has asked": (
        lambda rank: frame(Kind.WRITTEN, rank, raw("Written", step=3, problem="")),
        "for which nobody has asked",
    ),
    "a checkpoint of worker 0": (
        lambda rank: frame(Kind.CHECKPOINT, rank), "only server 0 asks other workers"
    ),
    **{
        f"a {kind.name} that nobody waits for": (
            lambda rank, kind=kind: frame(kind, rank, bytes(4), round=1),
            "which nobody waits for",
        )
        for kind in (Kind.UPDATED, Kind.PULLED)
    },
    **{
        f"a worker's {kind.name}": (
            partial(frame, kind),
            f"kind {kind.name}, which must not come from a server now",
        )
        for kind in set(Kind) - set(FROM_SERVERS[Phase.OPEN]) - {Kind.ACK}
    },
    **{
        f"too long a {kind.name}": (
            partial(packed, kind, payload_bytes=most + 1),
            f"kind {kind.name} with {most + 1} bytes; it has {most} at most",
        )
        for kind, (most, *_) in FROM_SERVERS[Phase.OPEN].items()
    },
}  # fmt: skip
TO_A_WORKER.update(
    {
        name: (lambda rank, words=words: welcome(rank) + words(rank), reason)
        for name, (words, reason) in WELCOMED.items()
    }
)


def test_a_worker_says_what_each_server_said_wrongly() -> None:
    attacked = Serving(len(TO_A_WORKER))
    links: List[socket.socket] = []
    try:
        links = attacked.links()
        for rank, (link, (words, _)) in enumerate(zip(links, TO_A_WORKER.values())):
            link.sendall(words(rank))
        told: Dict[int, str] = {}
        while len(told) < len(links):
            report = attacked.hear()
            assert isinstance(report, ReportFailure), report
            assert report.failure.role == "server" and not report.second_hand
            told[report.failure.rank] = report.failure.reason
        for rank, (name, (_, reason)) in enumerate(TO_A_WORKER.items()):
            assert told[rank].startswith("it broke the protocol: "), f"{name}: {told[rank]}"
            assert reason in told[rank], f"{name}: {told[rank]}"
        attacked.say(Abort(Failure("the test is done.", "server", 0)))
        output = output_of(attacked.process, TOLD_S)
        assert output is not None and "Traceback" not in output, output
        assert attacked.process.returncode == 1
    finally:
        for link in links:
            link.close()
        attacked.close()


@pytest.mark.parametrize(
    "address", [("a..b", 1), ("x" * 70, 1), ("127.0.0.1", 2**16), ("no\0name", 1)], ids=repr
)
def test_an_address_that_none_can_be_can_t_be_reached(address: Tuple[str, int]) -> None:
    with pytest.raises(OSError):
        Tcp().connect(address, TOLD_S)


# What a worker says to the scheduler.


def declared(**changes: object) -> bytes:
    return raw("DeclareKey", **{"key": "w", "shape": [2], "dtype": "float32", **changes})


TO_THE_SCHEDULER = {
    "no text": (NO_TEXT, "not what the protocol allows"),
    "nested": (nested("DeclareKey"), "not what the protocol allows"),
    "a dtype": (declared(dtype="nonsense"), "dtype 'nonsense'"),
    "a shape that overflows": (declared(shape=[2**62, 2**62]), "at most"),
    "negative extents": (declared(shape=[-2, -2]), "(-2, -2)"),
    "a layout of 2^40 elements": (declared(shape=[2**40]), "at most"),
    "too many slices": (declared(shape=[2**34]), "171798692 slices"),
}


class Member:
    """A process of the job, as far as the scheduler can tell."""

    def __init__(self, context: zmq.Context, port: int, role: str) -> None:
        self._session = Session()
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 0
        Credentials(SECRET.encode()).protect_dealer(self._dealer)
        self._dealer.connect(f"tcp://127.0.0.1:{port}")
        self._dealer.send(
            encode(
                Hello(
                    PROTOCOL_VERSION, VERSION, f"127.0.0.1:{port}/1w1s", role, 0, "127.0.0.1",
                    4000, os.getpid(), "tcp", os.urandom(TOKEN_BYTES),
                )
            )
        )  # fmt: skip

    def say(self, words: bytes) -> None:
        self._dealer.send_multipart(self._session.keep(words))

    def told(self, kind: type) -> Any:
        """The next message of a kind."""
        deadline = time.monotonic() + TOLD_S
        while self._dealer.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = decode(self._dealer.recv_multipart()[0], FromScheduler)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")


def test_the_scheduler_ends_the_job_for_a_worker_that_says_something_wrong() -> None:
    context = zmq.Context()
    schedulers: List[subprocess.Popen] = []
    try:
        ports = {}
        for name in TO_THE_SCHEDULER:
            with held_port() as holder:
                ports[name] = holder.getsockname()[1]
                schedulers.append(start_role("scheduler", JOIN, ports[name]))
        members = {
            name: [Member(context, port, role) for role in ("server", "worker")]
            for name, port in ports.items()
        }
        for name, (words, reason) in TO_THE_SCHEDULER.items():
            server, worker = members[name]
            worker.told(Roster)
            worker.say(encode(Ready(JobSettings(SLICE_SIZE))))
            worker.told(Agreed)
            worker.say(words)
            failure = server.told(Abort).failure
            assert (failure.role, failure.rank) == ("worker", 0), f"{name}: {failure}"
            assert reason in failure.reason, f"{name}: {failure}"
            for member in members[name]:
                member.say(encode(Bye()))
        for scheduler in schedulers:
            output = output_of(scheduler, TOLD_S)
            assert output is not None and "Traceback" not in output, output
            assert scheduler.returncode == 1
    finally:
        context.destroy()
        for scheduler in schedulers:
            end(scheduler)
