"""A member of the job may send any bytes: its connection ends with a reason, and nothing else does.

All that a server and a worker do with frames is the real thing, in memory.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Callable, List

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import P3Error
from p3kv.wire.connection import Connection
from p3kv.wire.header import INITIAL_ROUND, LAST_ROUND, Kind
from p3kv.wire.messages import (
    CodecChoices,
    DeclaredKey,
    ForwardOrder,
    OptimizerSettings,
    SliceSizes,
    Stalled,
    StateOutline,
    encode,
)  # fmt: skip
from tests.in_memory import MemoryJob
from tests.served import frame, own_fields, packed

SIZE, SLICE_SIZE = 250, 100
MESSAGES: List[Any] = [
    DeclaredKey(0, "w", (SIZE,), "float32", [(0, SIZE)], codecs=CodecChoices()),
    DeclaredKey(1, "b", (7, 0), "float16", []),
    DeclaredKey(2, "c", (2, 3), "int64", [(0, 6)], whole=True),
    SliceSizes(SLICE_SIZE), SliceSizes(7),
    ForwardOrder([0, 1]), ForwardOrder([2**32 - 1, 0, 0]),
    OptimizerSettings("mxnet", b"\x80"), OptimizerSettings("nobody", b""),
    StateOutline({"updates": 1}, [("a", "float32", [SIZE])]), StateOutline(None, []),
    StateOutline({}, [("a", "int8", [0]), ("a", "float64", [2, 3])]),
    Stalled(0, "w", 1, [0], [1], 10.0, 100.0), Stalled(2**32, "", 0, [], [], 0.0, 0.0),
]  # fmt: skip
numbers = st.sampled_from([0, 1, 2, 3, 5, SIZE, 2**16 - 1, 2**31, LAST_ROUND])
few = st.sampled_from([0, 0, 0, 1, 2])


def changed(message: Any, field: int, value: Any) -> bytes:
    """A message with another value in one of its fields."""
    values = msgspec.to_builtins(message)
    names = sorted(values)
    return msgspec.msgpack.encode({**values, names[field % len(names)]: value})


anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(),
        st.text(max_size=5), st.binary(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)  # fmt: skip
payloads = st.one_of(
    st.sampled_from([encode(message) for message in MESSAGES]),
    st.builds(changed, st.sampled_from(MESSAGES), st.integers(0, 20), anything),
    st.sampled_from([0, 4, 4 * SLICE_SIZE, 4 * (SIZE % SLICE_SIZE), 4 * SIZE]).map(bytes),
    st.binary(max_size=60),
)
frames = st.one_of(
    st.builds(
        lambda kind, payload, rank, numbers, priority, flags: frame(
            kind, rank, payload, flags=flags, **{
                name: priority if name == "priority" else number
                for name, number in zip(own_fields(kind), numbers)
            },
        ),
        st.sampled_from(list(Kind)), payloads, few, st.tuples(*[few] * 7) | st.tuples(
            *[numbers] * 7
        ),
        st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, 2, 3, 4, 8, 32, 96, 128, 255]),
    ),
    st.builds(
        lambda kind, size: packed(kind, 0, size), st.sampled_from(list(Kind)), numbers,
    ),
    st.binary(min_size=1, max_size=100),
)  # fmt: skip


def trained(job: MemoryJob) -> None:
    """A key has its initial value, and one worker has pushed for a round that is open."""
    keys = job.declare("w", SIZE)
    arrays = [np.ones(SIZE, np.float32) for _ in keys]
    job.workers[0].call(keys[0], INITIAL_ROUND, arrays[0], None)
    job.finish()
    job.workers[1].call(keys[1], 1, arrays[1], arrays[1])
    job.finish()


def fail(reason: str, _: int, error: str = "P3Error") -> None:
    """A server ends the job itself only for what it lacks, and not for what a peer has sent."""
    assert error == "ConfigError", reason
    raise P3Error(reason)


def hear(
    job: MemoryJob,
    sender: Connection,
    receiver: Connection,
    said: List[bytes],
    then: Callable[[], Any],
) -> None:
    """Has one end take bytes that the other end sends, until its connection ends."""
    for words in said:
        while words:
            words = words[sender._link.send([memoryview(words)]) :]
            try:
                receiver.receive()
                then()
            except P3Error as reason:
                assert str(reason)
                return


@settings(max_examples=25)
@given(st.sampled_from([0, 1]), st.lists(frames, min_size=1, max_size=6))
def test_a_server_ends_a_worker_s_connection_for_any_wrong_bytes_and_fails_for_none(
    rank: int, said: List[bytes]
) -> None:
    with closing(MemoryJob(2, 1, SLICE_SIZE)) as job:
        trained(job)
        server = job.servers[0]
        server.workers.on_failure = fail
        receiver = job._connections[job.workers[rank].servers[0]._link.other]  # type: ignore
        hear(job, job.workers[rank].servers[0], receiver, said, server.consumer.consume)


@settings(max_examples=25)
@given(st.lists(frames, min_size=1, max_size=6))
def test_a_worker_ends_a_server_s_connection_for_any_wrong_bytes_and_fails_for_none(
    said: List[bytes],
) -> None:
    with closing(MemoryJob(2, 1, SLICE_SIZE)) as job:
        trained(job)
        receiver = job.workers[1].servers[0]
        sender = job._connections[receiver._link.other]  # type: ignore
        hear(job, sender, receiver, said, lambda: None)
