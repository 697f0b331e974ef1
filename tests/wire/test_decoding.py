"""Whatever bytes arrive, decoding them ends with a message or with a protocol error."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, List

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from p3kv.config import Launch, Settings
from p3kv.errors import ConfigError, ProtocolError
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.wire.launcher_link import Cause, LauncherLink, PartEnded
from p3kv.wire.messages import (
    Abort,
    DeclaredKey,
    Failure,
    FromScheduler,
    OptimizerSettings,
    ReportFailure,
    SliceSizes,
    Stalled,
    StateOutline,
    StoreAtCut,
    ToScheduler,
    decode,
    encode,
)
from p3kv.wire.messages.base import MAX_DEPTH, is_too_deep
from p3kv.wire.messages.control import MAX_REASON_CHARS
from p3kv.wire.messages.keys import MAX_KEY_CHARS
from tests.jobs import DEADLINE_S, environment, output_of, results, run, start_role
from tests.served import TOLD_S, Served, frame, shake_hands

# Nesting.

full_of_containers = st.text(st.sampled_from("a\x80\u07ff\uffff"), max_size=60)
plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False),
        full_of_containers, st.binary(max_size=300),
        st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=20)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=20), st.dictionaries(full_of_containers, inner, max_size=20)
    ),
    max_leaves=60,
)  # fmt: skip


def depth(value: Any) -> int:
    """Arrays and maps within each other, counted in the value and not in its bytes."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@examples(max_examples=50)
@given(plain, st.integers(0, 2 * MAX_DEPTH), st.lists(st.booleans(), min_size=1, max_size=5))
def test_the_depth_of_a_message_is_that_of_its_value(
    value: Any, more: int, in_maps: List[bool]
) -> None:
    for level in range(more):
        value = {"before": [1], "more": value} if in_maps[level % len(in_maps)] else [{}, value]
    assert is_too_deep(msgspec.msgpack.encode(value)) == (depth(value) > MAX_DEPTH)


@given(st.binary(max_size=400), st.integers(0, 300))
def test_the_depth_of_noise_is_found_without_an_error(noise: bytes, start: int) -> None:
    is_too_deep(b"\x91" * (start % 40) + noise)


BOMB = """
import sys
from p3kv.errors import ProtocolError
from p3kv.wire.messages import StateOutline, decode
sys.setrecursionlimit(2**31 - 1)
outline = b"\\x83\\xa4type\\xacStateOutline\\xa7numbers"
for bomb in (b"\\x91" * 2**22, outline + b"\\x81\\xa1a" * 2**22):
    try:
        decode(bomb, StateOutline)
    except ProtocolError as error:
        print(error)
"""


def test_a_bomb_is_refused_before_a_decoder_follows_it_whatever_the_recursion_limit() -> None:
    result = run([sys.executable, "-c", BOMB], environment(), timeout_s=DEADLINE_S)
    assert result.code == 0, result.output
    assert result.output.count(f"it nests deeper than {MAX_DEPTH} arrays and maps") == 2


# Values.


def test_a_map_for_the_key_of_a_map_is_a_protocol_error() -> None:
    data = b"\x83\xa4type\xacStateOutline\xa6arrays\x90\xa7numbers\x81"
    assert decode(data + b"\xa1a\xc0", StateOutline).numbers == {"a": None}
    for key in (b"\x80", b"\x81\xc0\xc0", b"\x90", b"\xc4\0", b"\xc0"):
        with pytest.raises(ProtocolError):
            decode(data + key + b"\xc0", StateOutline)


OUTLINE = {"type": "StateOutline", "numbers": {}, "arrays": []}
STALLED = {
    "type": "Stalled", "key_id": 0, "called": "w", "round": 1, "missing": [0], "arrived": [1],
    "waited_s": 10.0, "timeout_s": 20.0,
}  # fmt: skip
KEY = {"type": "DeclareKey", "key": "w", "shape": [2], "dtype": "float32"}
AT_CUT = {
    "type": "StoreAtCut", "known": {"type": "ResumedStore", "store": 0, "steps": 0, "numbers": {}},
    "whole": False, "rounds": [], "names": {0: "w"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({**OUTLINE, "arrays": [("a", "float32", [0, 2**63])]}, StateOutline),
        ({**OUTLINE, "arrays": [("a", "float32", [0] * 33)]}, StateOutline),
        ({**OUTLINE, "numbers": {"a": b"bytes"}}, StateOutline),
        ({**OUTLINE, "numbers": {"a": [{"b": msgspec.msgpack.Ext(5, b"")}]}}, StateOutline),
        ({**STALLED, "waited_s": float("nan")}, Stalled),
        ({**STALLED, "timeout_s": float("inf")}, Stalled),
        ({**KEY, "shape": [0, 2**63]}, ToScheduler),
        ({**KEY, "key": "w" * (MAX_KEY_CHARS + 1)}, ToScheduler),
        ({**KEY, "name": "w" * (MAX_KEY_CHARS + 1)}, ToScheduler),
        ({**AT_CUT, "names": {0: "w" * (MAX_KEY_CHARS + 1)}}, StoreAtCut),
        ({**AT_CUT, "names": {-1: "w"}}, StoreAtCut),
    ],
    ids=[
        "extent",
        "dimensions",
        "bytes",
        "extension",
        "nan",
        "infinite",
        "shape",
        "key",
        "name",
        "name in a checkpoint",
        "name of no key",
    ],
)
def test_a_value_that_nobody_can_use_is_a_protocol_error(wrong: dict, expected: Any) -> None:
    right = {**OUTLINE, "numbers": {"a": [1, 2.5, None, {"b": "c"}]}}
    assert decode(msgspec.msgpack.encode(right), StateOutline).numbers == right["numbers"]
    assert decode(msgspec.msgpack.encode(AT_CUT), StoreAtCut).names == {0: "w"}
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(wrong), expected)


def test_the_reason_of_a_failure_is_cut_and_so_can_always_be_told() -> None:
    failure = Failure("r" * 2**21, "worker", 0, hint="h" * 2**21)
    assert (len(failure.reason), len(failure.hint)) == (MAX_REASON_CHARS, MAX_REASON_CHARS)
    assert decode(encode(Abort(failure)), FromScheduler).failure == failure


# In a job.

SLICES = frame(Kind.SLICE_SIZES, 0, encode(SliceSizes(100)), from_round=INITIAL_ROUND)
A_KEY = SLICES + frame(
    Kind.KEY, 0, encode(DeclaredKey(0, 0, (25, 10), "float32", [(0, 250)]))
)  # fmt: skip


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def outline(**changes: Any) -> bytes:
    return frame(Kind.STATE, 0, msgspec.msgpack.encode({**OUTLINE, **changes}))


def optimizer(**changes: Any) -> bytes:
    plain = {
        "type": "PlainOptimizer", "name": "SGD", "attributes": {}, "rate": 0.1, "multipliers": [],
        "since_step": 0, **changes,
    }  # fmt: skip
    settings = OptimizerSettings("mxnet", msgspec.msgpack.encode(plain))
    return frame(Kind.OPTIMIZER, 0, encode(settings), from_step=1)


FROM_RANK_0 = {
    "a state with nested numbers": (A_KEY + outline(numbers={"a": nested(300)}), "nests deeper"),
    "a nested optimizer": (optimizer(attributes={"momentum": nested(300)}), "nests deeper"),
}  # fmt: skip


def test_a_server_names_worker_0_for_words_that_can_not_be_decoded() -> None:
    servers = {name: Served(1) for name in FROM_RANK_0}
    links: List[socket.socket] = []
    try:
        for served in servers.values():
            links.append(socket.create_connection(served.welcome(), timeout=TOLD_S))
            shake_hands(links[-1], 0)
        for link, (words, _) in zip(links, FROM_RANK_0.values()):
            assert link.recv(1)  # it is welcome
            link.sendall(words)
        for name, served in servers.items():
            report = served.hear()
            assert isinstance(report, ReportFailure), f"{name}: {report}"
            assert (report.failure.role, report.failure.rank) == ("worker", 0), f"{name}: {report}"
            assert FROM_RANK_0[name][1] in report.failure.reason, f"{name}: {report}"
            served.say(Abort(report.failure))
        for name, served in servers.items():
            output = output_of(served.process, TOLD_S)
            assert output is not None and "Traceback" not in output, f"{name}: {output}"
    finally:
        for link in links:
            link.close()
        for served in servers.values():
            served.close()


# The launcher's socket.


@pytest.mark.parametrize(
    "words",
    [b"\xff\xfe\n", b"{}\n", b"[" * 5000 + b"\n", b'{"type":"Cause","part":1}\n', b" " * 2**21],
    ids=["no text", "empty", "nested", "wrong", "endless"],
)
def test_foreign_words_on_the_launcher_s_socket_end_it_and_are_logged(
    words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(TOLD_S)
    with ours, theirs, caplog.at_level(logging.ERROR, "p3kv"):
        link = LauncherLink(ours, Cause)
        LauncherLink(theirs, PartEnded).send(Cause("worker 0", "it failed", []))
        assert link.receive() == [Cause("worker 0", "it failed", [])]

        def send() -> None:
            with suppress(OSError):  # the other end has heard enough
                theirs.sendall(words)

        sender = threading.Thread(target=send)
        sender.start()
        assert link.receive() == []
        ours.close()
        sender.join(TOLD_S)
    assert "P3KV_LAUNCHER_FD" in caplog.text


# The environment.

PLACE = {
    "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1",
}  # fmt: skip
OURS = (
    *PLACE, "P3KV_JOB", "DMLC_NODE_HOST", "DMLC_INTERFACE", "DMLC_WORKER_ID", "DMLC_TASK_ID",
    "P3KV_SCHEDULER_FD", "P3KV_LAUNCHER_FD", "P3KV_LAUNCHED", "P3KV_SLICE_SIZE", "P3KV_PLACEMENT",
    "P3KV_TRACE", "P3KV_STALL_TIMEOUT_S", "P3KV_DETERMINISTIC", "P3KV_TRANSPORT",
)  # fmt: skip
# What a process gets from its environment: bytes that are no UTF-8 become lone surrogates.
anything = st.one_of(
    st.text(max_size=10), st.integers().map(str), st.floats().map(str),
    st.binary(max_size=10).map(lambda data: data.decode(errors="surrogateescape")),
    st.just("9" * 5000),
)  # fmt: skip


@examples(max_examples=50)
@given(st.dictionaries(st.sampled_from(OURS), anything, max_size=4))
def test_any_environment_is_a_place_that_can_be_told_to_others_or_a_config_error(
    changes: dict,
) -> None:
    try:
        launch = Launch.from_environment({**PLACE, **changes})
        settings = Settings.from_environment(changes)
    except ConfigError as error:
        str(error).encode()
        return
    assert launch is not None
    encode([launch.job, launch.root_host, launch.node_host, launch.rank])
    encode([settings.placement, settings.transport, settings.consistency])


NO_TEXT = b"\xff\xfe".decode(errors="surrogateescape")
WRONG = {
    "job": ({"P3KV_JOB": NO_TEXT}, "P3KV_JOB is '\\udcff\\udcfe'; it must be text in UTF-8"),
    "rank": ({"DMLC_WORKER_ID": 2**70}, f"DMLC_WORKER_ID is '{2**70}'; it must be a whole"),
    "setting": ({"P3KV_PLACEMENT": NO_TEXT}, "P3KV_PLACEMENT is "),
    "socket": ({"P3KV_LAUNCHER_FD": 999}, "P3KV_LAUNCHER_FD is 999, which is no socket here"),
}


def test_bytes_that_no_process_can_use_are_named_in_one_line() -> None:
    command = [sys.executable, "-c", "import p3kv"]
    start = time.monotonic()
    processes = {
        name: start_role("scheduler" if name == "socket" else "worker", command, 9000, **changes)
        for name, (changes, _) in WRONG.items()
    }
    ended = results(processes, start, TOLD_S)
    for name, (_, words) in WRONG.items():
        assert words in ended[name].output, f"{name}: {ended[name].output}"
        assert "Traceback" not in ended[name].output and ended[name].code == 1
