"""A job of the scheduler without any socket: messages in, messages out."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from p3kv.common.version import VERSION
from p3kv.scheduler.job import Job, Replies
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Abort,
    Failure,
    Hello,
    JobSettings,
    Ready,
)

NAME = "127.0.0.1:9000/2w2s"
SLICE_SIZE = 100


def hello(role: str, wish: Optional[int] = None, **changes: Any) -> Hello:
    fields: Dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "version": VERSION,
        "job": NAME,
        "role": role,
        "rank": wish,
        "host": "10.0.0.7",
        "port": 4000 if role == "server" else 0,
        "pid": 321,
        "transport": "tcp" if role == "server" else "",
        "process": bytes(TOKEN_BYTES),
    }
    return Hello(**{**fields, **changes})


def to(replies: Replies, identity: bytes) -> List[Any]:
    """What one node is told."""
    return [message for receiver, message in replies if receiver == identity]


def of(replies: Replies, kind: type) -> Dict[bytes, Any]:
    """All messages of a kind, each node's own; nobody gets two."""
    found = [(receiver, message) for receiver, message in replies if isinstance(message, kind)]
    assert len(dict(found)) == len(found)
    return dict(found)


def worker(rank: int) -> bytes:
    return b"worker %d" % rank


def server(rank: int) -> bytes:
    return b"server %d" % rank


def assembled(workers: int = 2, servers: int = 2) -> Job:
    job = Job(NAME, workers, servers)
    for rank in range(servers):
        job.handle(server(rank), hello("server", port=4000 + rank))
    for rank in range(workers):
        job.handle(worker(rank), hello("worker", pid=100 + rank))
    assert job.assembled
    return job


def running(workers: int = 2, servers: int = 2) -> Job:
    job = assembled(workers, servers)
    for rank in range(workers):
        job.handle(worker(rank), Ready(JobSettings(SLICE_SIZE)))
    return job


def aborted(replies: Replies, reason: str, error: type) -> Failure:
    """All Aborts say the same; returns the failure."""
    failures = [message.failure for message in of(replies, Abort).values()]
    assert failures, "nobody was told"
    assert all(failure == failures[0] for failure in failures)
    assert reason in str(failures[0].to_error())
    assert failures[0].error == error.__name__
    return failures[0]
