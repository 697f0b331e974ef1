"""Which frame may come when: the table of each direction, and what both sides make of it."""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from typing import Any, Dict, Iterator, List, Set, Tuple, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.config import MAX_SLICE_ELEMS, Launch, Settings
from p3kv.errors import P3Error, ProtocolError
from p3kv.wire.fields import Header
from p3kv.wire.header import HEADER_BYTES, INITIAL_ROUND, MAX_STATE_BYTES, Kind
from p3kv.wire.messages import MAX_MESSAGE_BYTES, MAX_PROOF_BYTES
from p3kv.wire.protocol import (
    FROM_NEIGHBOURS,
    FROM_SERVERS,
    FROM_WORKERS,
    Conversation,
    Rule,
    Rules,
)
from p3kv.worker.joining import Joining
from tests.adding import Adding
from tests.in_memory import KEY, MemoryJob, Server
from tests.served import frame, hello, proof

SLICE, WORDS, PROBE = MAX_SLICE_ELEMS * 8, MAX_MESSAGE_BYTES, 65536
LETTERS = {
    Kind.HELLO: "h", Kind.CHALLENGE: "C", Kind.PROOF: "P", Kind.WELCOME: "w", Kind.KEY: "k",
    Kind.OPTIMIZER: "z", Kind.PUSH: "p",
    Kind.PULL: "q", Kind.UPDATED: "u", Kind.PULLED: "v", Kind.BYE: "b", Kind.ORDER: "r",
    Kind.PROBE: "e", Kind.SLICE_SIZES: "s", Kind.OPEN: "o", Kind.ENDED: "d", Kind.STALLED: "l",
    Kind.STATES: "a", Kind.STATE: "c", Kind.STATE_BYTES: "y", Kind.LOADED: "x",
    Kind.CLIPPED: "i", Kind.STEP_PUSHED: "j", Kind.SQUARES: "g", Kind.SCALE: "f", Kind.NORM: "n",
    Kind.VOTE: "8",
    Kind.PUSH_ROWS: "t", Kind.PULL_ROWS: "1", Kind.ROWS: "2",
    Kind.CHECKPOINT: "3", Kind.WRITTEN: "4", Kind.RESUMED: "5", Kind.CUT: "6",
    Kind.FORGET: "7",
}  # fmt: skip
MOST_BYTES = {
    "C": 64,
    **dict.fromkeys("Pw", MAX_PROOF_BYTES),
    "h": 64,
    **dict.fromkeys("kzrlscjgfn34568", WORDS),
    **dict.fromkeys("puv", SLICE),
}
MOST_BYTES.update(e=PROBE, y=MAX_STATE_BYTES)
MOST_BYTES.update(dict.fromkeys("t12", SLICE + MAX_SLICE_ELEMS * 4))
FLAGS = {
    "p": 1 | 2 | 4 | 8 | 16 | 32 | 64 | 128,
    "q": 4,
    "t": 1 | 2 | 8 | 16 | 32 | 64 | 128,
    "1": 4 | 8 | 16,
    "2": 1 | 2 | 8,
    "a": 4,
    "c": 4,
    "u": 2 | 128,
    "v": 2,
    "d": 128,
}
"""Those that frames may have."""
WELCOME = "!"
"""What the server says to a worker, in a history of what the worker says."""
DIRECTIONS: Dict[str, Tuple[Rules, str]] = {
    "worker": (FROM_WORKERS, "h(P(![kzpqt1resoacyijfn345678]*b?)?)?"),
    "server": (FROM_SERVERS, "C(w([uv2dsoerlcyxgn3458]*b?)?)?"),
}
"""By who speaks: the table, and the same as a regular expression of whole histories."""


def frames(rank: int) -> st.SearchStrategy[Header]:
    """What a peer of this rank may say, and may not."""
    sizes = [0, 0, *(most + more for most in {*MOST_BYTES.values()} for more in (0, 1))]
    return st.builds(
        lambda kind, other, size, flag: Header(kind, rank ^ other, flag, size),
        st.one_of(st.sampled_from(Kind), st.integers(0, 255)),
        st.sampled_from([0, 0, 0, 0, 1]),
        st.sampled_from(sizes),
        st.sampled_from([0] * 8 + [1 << bit for bit in range(8)]),
    )


@pytest.mark.parametrize("role", DIRECTIONS)
@settings(max_examples=300)
@given(st.data(), st.integers(0, 1), st.integers(0, 3))
def test_what_is_accepted_is_what_the_protocol_says(
    role: str, data: st.DataObject, rank: int, well: int
) -> None:
    rules, language = DIRECTIONS[role]
    # Many histories begin well, or most would end with their first frame.
    kinds = [Kind.HELLO, Kind.PROOF] if role == "worker" else [Kind.CHALLENGE, Kind.WELCOME]
    said: List[Any] = [*(Header(kind, rank) for kind in kinds), WELCOME][:well]
    said += data.draw(st.lists(st.one_of(st.just(WELCOME), frames(rank)), max_size=25))
    conversation = Conversation(rules, role)
    history = ""
    for header in said:
        if isinstance(header, str):
            if history == "hP":
                conversation.welcome()
                history += WELCOME
            continue
        letter = LETTERS.get(header.kind, "?")
        allowed = (
            bool(re.fullmatch(language, history + letter))
            and header.payload_bytes <= MOST_BYTES.get(letter, 0)
            and not header.flags & ~FLAGS.get(letter, 0)
            and (role == "server" or letter not in "zrcyijfn35" or header.rank == 0)
            and conversation.peer in (None, header.rank)
        )
        try:
            conversation.hear(header)
        except ProtocolError:
            assert not allowed, (history, header)
        else:
            assert allowed, (history, header)
            history += letter
            conversation.peer = header.rank


def kinds(rules: Rules) -> Set[int]:
    return {kind for allowed in rules.values() for kind in allowed}


def all_of(rules: Rules) -> Iterator[Tuple[int, Rule]]:
    for allowed in rules.values():
        yield from allowed.items()


def heard_by(job: MemoryJob) -> Iterator[Tuple[Rules, Dict[int, Any], Dict[int, Any]]]:
    """What may come from each side, and the methods that take it and give it memory."""
    (worker,), (server,) = job.workers, job.servers
    stranger, served = server.admission, server.connections[0].handler
    yield (
        FROM_WORKERS,
        {**stranger.arrivals, **served.arrivals},
        {**stranger.landings, **served.landings},
    )
    # It only keeps what else it gets.
    joining = Joining(*[None] * 3, worker.handshakes, b"")  # type: ignore[arg-type]
    plane, sums = worker.data_plane, worker.data_plane.host_sums
    yield (
        FROM_SERVERS,
        {**plane.arrivals, **joining.arrivals},
        {**plane.landings, **joining.landings},
    )
    yield FROM_NEIGHBOURS, dict(sums.arrivals), dict(sums.landings)


def test_every_kind_is_in_a_table_and_whoever_hears_it_takes_it() -> None:
    heard = kinds(FROM_WORKERS) | kinds(FROM_SERVERS) | kinds(FROM_NEIGHBOURS)
    assert heard | {Kind.ACK} == set(Kind)
    with closing(MemoryJob(1, 1, 100)) as job:
        for rules, arrivals, landings in heard_by(job):
            assert set(arrivals) == kinds(rules)
            assert set(landings) <= {kind for kind, rule in all_of(rules) if rule.most_bytes}


def test_whoever_takes_a_kind_of_frames_knows_its_header_and_its_message() -> None:
    with closing(MemoryJob(1, 1, 100)) as job:
        for rules, arrivals, landings in heard_by(job):
            for kind, method in (*arrivals.items(), *landings.items()):
                expected = get_type_hints(method)["header"]
                of_header = get_args(expected) or (expected,)
                assert issubclass(Kind(kind).header, of_header), f"{method} takes {Kind(kind)!r}"
            for kind, rule in all_of(rules):
                *_, payload = inspect.signature(arrivals[kind]).parameters
                expected = get_type_hints(arrivals[kind])[payload]
                if rule.message is not None:
                    assert issubclass(rule.message, expected), f"{arrivals[kind]} of {Kind(kind)!r}"
                else:
                    assert rule.most_bytes or expected is type(None), f"{Kind(kind)!r} is empty"


def test_a_worker_says_nothing_before_its_server_serves() -> None:
    """Others that wait with it would hear it before their welcome, and blame the server."""
    launch = Launch("server", "127.0.0.1", 9000, 2, 1, "in memory")
    server = Server(0, launch, Settings(), Adding())
    server.admission._serving = False
    near = server.listener.connect()
    near.send([memoryview(hello(0, key=KEY))])
    server.admission._accept()
    server.connections[0].receive()
    while server.connections[0].writer:
        server.connections[0].send()
    answer = memoryview(bytearray(200))
    near.receive_into([answer])
    words = proof(0, bytes(answer[HEADER_BYTES:]), key=KEY, consistency="bulk_synchronous")
    near.send([memoryview(words + frame(Kind.OPEN, 0, step=1))])
    with pytest.raises(P3Error, match="OPEN, which must not come before the welcome"):
        server.connections[0].receive()
    near.close()
    server.close()


@pytest.mark.parametrize("queued", [False, True], ids=["later values", "queued values"])
def test_a_server_says_nothing_after_its_goodbye(queued: bool) -> None:
    """Whatever the worker still waited for: it would find that the server broke the protocol."""
    size = 50
    with closing(MemoryJob(2, 1, 100)) as job:
        keys = job.declare("w", size)
        leaving, other = job.workers
        arrays = [np.ones(size, np.float32) for _ in keys]
        leaving.call(keys[0], INITIAL_ROUND, arrays[0], None)
        leaving.begin()
        job.finish()
        for worker, key, array in zip(job.workers, keys, arrays):
            worker.call(key, 1, array, array)
            worker.begin()
        job.carry_all(leaving.data_plane.servers[0])
        if queued:
            job.carry_all(other.data_plane.servers[0])
            while job.servers[0].consumer.consume():
                pass
        leaving.data_plane.tell(Header(Kind.BYE, 0))
        job.carry_all(leaving.data_plane.servers[0])
        job.finish()
        assert not leaving.data_plane.servers[0].closed
        assert [done for done, _ in other.complete] == ["w"]
