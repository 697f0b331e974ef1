"""What processes say to each other: it arrives as it was sent, and nothing else is believed."""

from __future__ import annotations

import ast
import os
import pickle
import re
import struct
import typing
from pathlib import Path
from typing import Any, List

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import p3kv
from p3kv import errors
from p3kv.common.registry import Choice
from p3kv.config import MAX_SLICE_ELEMS, ROLES
from p3kv.errors import P3Error, ProtocolError
from p3kv.scheduler.job import Job
from p3kv.wire import messages
from p3kv.wire.fields import Header, HelloHeader, PushHeader
from p3kv.wire.header import (
    HEADER_BYTES,
    LAST_ROUND,
    MAGIC,
    Kind,
    pack_header,
    unpack_header,
)
from p3kv.wire.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Checkpoint,
    DataHello,
    DeclaredKey,
    DeclareKey,
    Failure,
    ForwardOrder,
    FromScheduler,
    Member,
    OptimizerSettings,
    Resumed,
    SliceSizes,
    ToScheduler,
    Written,
    decode,
    encode,
)
from tests.scheduled import NAME, hello
from tests.served import own_fields

bytes_ = st.integers(0, 2**8 - 1)
shorts = st.integers(0, 2**16 - 1)
words = st.integers(0, 2**32 - 1)
priorities = st.integers(-(2**31), 2**31 - 1)
longs = st.integers(0, 2**64 - 1)


def headers_of(kind: Kind) -> st.SearchStrategy[Header]:
    others = {"priority": priorities, "weight": st.floats(0, allow_infinity=False)}
    own = {name: others.get(name, words) for name in own_fields(kind)}
    return st.builds(kind.header, st.just(kind), shorts, bytes_, words, longs, **own)


headers = st.sampled_from(Kind).flatmap(headers_of)


def packed(header: Header) -> bytes:
    return pack_header(header, header.payload_bytes, header.received)


def instances(union: Any) -> Any:
    """A strategy for all messages of a union, each made from its declared field types."""
    kinds = typing.get_args(union) or (union,)
    return st.one_of([made(kind) for kind in kinds])


def bucket(members: List[Member]) -> DeclareKey:
    elems = sum(member.size_elems for member in members)
    return DeclareKey("w", (elems,), "float32", layout="bucket", members=members)


def made(kind: Any) -> Any:
    if kind is DeclareKey:
        return st.builds(kind, **fields(kind)) | st.lists(
            st.builds(Member, **fields(Member)), min_size=2, max_size=messages.MAX_MEMBERS
        ).map(lambda members: bucket(members))
    if kind is not DeclaredKey:
        return st.builds(kind, **fields(kind))
    return ALLOWED["runs"].flatmap(
        lambda runs: st.builds(
            kind,
            **{
                **fields(kind),
                "runs": st.just(runs),
                "shape": st.just((sum(length for _, length in runs), 1)),
            },
        )
    )


ranks = st.integers(0, messages.MAX_RANK)
slice_sizes = st.integers(1, MAX_SLICE_ELEMS)
steps = st.integers(0, messages.MAX_STEP)
ALLOWED: dict = {
    "role": st.sampled_from(ROLES),
    "round": st.integers(messages.UNKNOWN, LAST_ROUND),
    "key_id": words,
    "dtype": st.sampled_from(messages.DTYPES),
    "runs": st.dictionaries(ranks, st.integers(1, 2**30), max_size=4).map(
        lambda runs: list(runs.items())
    ),
    "shape": st.lists(st.integers(0, 1000), max_size=3).map(tuple),
    "layout": st.text(max_size=64),
    "members": st.just([]),
    "token": st.binary(min_size=messages.TOKEN_BYTES, max_size=messages.TOKEN_BYTES),
    "process": st.binary(min_size=messages.TOKEN_BYTES, max_size=messages.TOKEN_BYTES),
    "received": st.integers(0, messages.MAX_RECEIVED),
    "port": words,
    "store": shorts,
    "rank": ranks,
    "slice_size": slice_sizes,
    "credit_size": st.none() | slice_sizes,
    **dict.fromkeys(("asked_ns", "received_ns", "sent_ns"), st.integers(0, 2**62)),
    "checkpoint_every": st.integers(1, 2**31 - 1),
    "step": steps,
    "steps": steps,
    "worker": st.integers(messages.UNKNOWN, messages.MAX_RANK),
    "num_workers": ranks,
    "keep_from": st.integers(messages.UNKNOWN, messages.MAX_STEP),
    "identity": st.text(min_size=1, max_size=20),
    "rounds": st.lists(st.tuples(words, words), max_size=3),
    "names": st.dictionaries(words, st.text(max_size=20), max_size=3),
    "neighbours": st.lists(ranks, max_size=3).map(tuple),
    "pid": st.integers(1, 2**31 - 1),
    "descriptor": st.integers(0, 2**31 - 1),
    **dict.fromkeys(("parameters", "wait"), words),
    **dict.fromkeys(("waited_s", "std"), st.floats(0, 1e9)),
    "seed": longs,
    "zero_row": st.integers(messages.UNKNOWN, messages.MAX_KEY_ELEMS),
    **dict.fromkeys(
        ("asks", "awaits", "lacks"),
        st.lists(st.tuples(words, st.integers(0, LAST_ROUND)), max_size=3).map(tuple),
    ),
    **dict.fromkeys(("offset", "size_bytes"), st.integers(0, 2**63 - 1)),
}
"""Values of the fields that can't have just any."""
counts, measured_s = st.integers(0, 2**64 - 1), st.floats(0, allow_nan=False, allow_infinity=False)
MEASURED: dict = {
    int: counts,
    float: measured_s,
    str: st.text(max_size=20),
    typing.Tuple[int, ...]: st.tuples(counts, counts),
    typing.Tuple[float, ...]: st.tuples(measured_s, measured_s),
}
"""Of the fields of what was measured, by type."""


def fields(kind: Any) -> dict:
    types = typing.get_type_hints(kind)
    names = [field.name for field in msgspec.structs.fields(kind)]
    return {name: ALLOWED.get(name, values(types[name])) for name in names}


def values(kind: Any) -> Any:
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if kind in typing.get_args(messages.Numbers):
        return st.builds(
            kind, **{name: MEASURED[t] for name, t in typing.get_type_hints(kind).items()}
        )
    if isinstance(kind, type) and issubclass(kind, messages.Message):
        return st.builds(kind, **fields(kind))
    if kind is Choice:
        return st.builds(
            Choice, **{name: values(t) for name, t in typing.get_type_hints(Choice).items()}
        )
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if origin is typing.Union:
        return st.one_of([values(argument) for argument in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    plain = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        type(None): st.none(),
        typing.Any: st.none(),
    }
    return plain[kind]


PACKAGE = Path(p3kv.__file__).parent
EXPECTED = [
    ToScheduler, FromScheduler, DataHello, DeclaredKey, ForwardOrder, OptimizerSettings, Checkpoint,
    Resumed, Written,
]  # fmt: skip
NAMES = [
    "to scheduler", "from scheduler", "data hello", "declared key", "forward order", "optimizer",
    "checkpoint", "resumed", "written",
]  # fmt: skip


@given(headers, st.integers(0, 40))
def test_a_header_arrives_as_it_was_sent_wherever_it_lies(header: Header, offset: int) -> None:
    data = bytes(offset) + packed(header) + b"more"
    assert unpack_header(memoryview(data), offset) == header


@given(headers)
def test_all_headers_have_the_same_size(header: Header) -> None:
    assert len(packed(header)) == HEADER_BYTES


def test_headers_are_little_endian_and_begin_with_their_kind() -> None:
    data = packed(PushHeader(Kind.PUSH, 0x0102, 7, 0x03040506, 8, key=0x0708090A, round=9))
    common = bytes([5, 2, 1, 7, 6, 5, 4, 3, 8]) + bytes(7)
    assert data[:24] == common + bytes([10, 9, 8, 7, 9, 0, 0, 0])


def test_a_hello_shows_the_magic_word() -> None:
    assert b"P3KV" in packed(HelloHeader(Kind.HELLO, 0, magic=MAGIC))


@pytest.mark.parametrize("field", ["rank", "key", "slice", "round", "step", "payload_bytes"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_number_that_does_not_fit_its_field_is_an_error_not_another_number(
    field: str, value: int
) -> None:
    with pytest.raises(struct.error):
        packed(PushHeader(**{"kind": Kind.PUSH, "rank": 0, field: value}))


NUMBERS = {name for kind in Kind for name in own_fields(kind)}


@pytest.mark.parametrize("kind", Kind)
def test_numbers_that_a_kind_does_not_have_can_be_neither_given_nor_read(kind: Kind) -> None:
    own = own_fields(kind)
    header = unpack_header(memoryview(packed(kind.header(kind, 0))), 0)
    assert {name for name in NUMBERS if hasattr(header, name)} == {*own}
    for name in NUMBERS - {*own}:
        with pytest.raises(TypeError):
            kind.header(kind, 0, **{name: 1})
    for other in {one.header for one in Kind} - {kind.header}:
        with pytest.raises(AssertionError, match=f"no header of {kind.name}"):
            packed(other(kind, 0))


def test_a_kind_that_is_none_is_read_all_the_same_to_be_refused_by_its_number() -> None:
    for kind in set(range(256)) - {*Kind}:
        header = Header(kind, 1, 2, 3, 4)
        assert unpack_header(memoryview(packed(header)), 0) == header


KINDS = {
    kind.__name__
    for union in EXPECTED
    for kind in (typing.get_args(union) or (union,))
}  # fmt: skip
FIELDS = {
    field.name
    for union in EXPECTED
    for kind in (typing.get_args(union) or (union,))
    for field in msgspec.structs.fields(kind)
}  # fmt: skip
anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=5),
        st.binary(max_size=20), st.integers(-(2**63), 2**64 - 1),
        st.sampled_from(messages.DTYPES + ROLES),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip
likely = st.builds(
    lambda kind, more: msgspec.msgpack.encode({"type": kind, **more}),
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(sorted(FIELDS)), anything, max_size=len(FIELDS)),
)
"""What looks like a message and has anything in its fields."""


def broken(data: bytes, at: int, by: bytes) -> bytes:
    """Some bytes replaced by others."""
    at %= len(data)
    return data[:at] + by + data[at + len(by) :]


@given(
    st.one_of(
        st.binary(max_size=200),
        likely,
        st.builds(broken, likely, st.integers(0, 1000), st.binary(min_size=1, max_size=8)),
        st.builds(lambda start, depth: start + b"\x91" * depth, likely, st.integers(0, 5000)),
    ),
    st.sampled_from(EXPECTED),
)
def test_garbage_is_a_protocol_error_and_nothing_else(data: bytes, expected: Any) -> None:
    try:
        message = decode(data, expected)
    except ProtocolError:
        return
    # What is accepted after all is a message: it says the same when it is sent again.
    assert decode(encode(message), expected) == message


@pytest.mark.parametrize("expected", EXPECTED, ids=NAMES)
@given(data=st.data())
def test_a_message_arrives_whole_or_as_a_protocol_error(expected: Any, data: Any) -> None:
    message = data.draw(instances(expected))
    whole = encode(message)
    arrived = decode(memoryview(whole), expected)
    assert type(arrived) is type(message)
    assert arrived == message
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(whole[:length], expected)


@given(instances(ToScheduler), st.binary(min_size=1, max_size=5))
def test_a_message_with_something_behind_it_is_a_protocol_error(message: Any, more: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(message) + more, ToScheduler)


@given(instances(FromScheduler))
def test_a_message_of_the_other_direction_is_a_protocol_error(message: Any) -> None:
    names = {kind.__name__ for kind in typing.get_args(ToScheduler)}
    if type(message).__name__ not in names:
        with pytest.raises(ProtocolError):
            decode(encode(message), ToScheduler)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "DeclareKey", "key": 1.5, "shape": [2], "dtype": "float32"},
        {"type": "DeclareKey", "key": "w", "shape": "2", "dtype": "float32"},
        {"type": "DeclareKey", "key": "w", "shape": [2]},
        {"type": "DeclareKey", "key": "w", "shape": [None], "dtype": "float32"},
        {"type": "os.system", "key": "w", "shape": [2], "dtype": "float32"},
    ],
    ids=["key", "shape", "missing", "extent", "name"],
)
def test_a_field_of_another_type_is_a_protocol_error(wrong: dict) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(wrong), ToScheduler)


KEY = {"key": "w", "dtype": "float32"}
KNOWN = {"type": "DeclaredKey", "key_id": 0, **KEY, "shape": [2, 2], "runs": [[0, 4]]}
SETTINGS = {"type": "JobSettings"}
LONG = "x" * 65


def by_codec(*choice: object) -> dict:
    """A key whose gradients travel by this codec."""
    return {**KNOWN, "codecs": {"type": "CodecChoices", "gradients": choice}}


DECLARED = {"type": "DeclareKey", **KEY}
HELLO = {
    "type": "Hello", "protocol": 1, "version": "", "job": "", "role": "worker", "rank_wish": None,
    "host": "", "port": 1, "pid": 1, "transport": "tcp", "process": bytes(messages.TOKEN_BYTES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({**DECLARED, "shape": [2**62, 2**62]}, ToScheduler),
        ({**DECLARED, "shape": [2**32, 2**32]}, ToScheduler),  # 0 in 64 bits
        ({**DECLARED, "shape": [2**40]}, ToScheduler),
        ({**DECLARED, "shape": [-2, -2]}, ToScheduler),
        ({**DECLARED, "shape": [1] * 33}, ToScheduler),
        ({**DECLARED, "shape": [2], "dtype": "nonsense"}, ToScheduler),
        ({**DECLARED, "shape": [2], "dtype": "O"}, ToScheduler),
        ({**DECLARED, "shape": [2], "store": 2**16}, ToScheduler),
        ({**HELLO, "port": 2**32}, ToScheduler),
        ({**HELLO, "host": "h" * 256}, ToScheduler),
        ({**HELLO, "transport": "x" * 257}, ToScheduler),
        ({**HELLO, "process": b"1"}, ToScheduler),
        ({**HELLO, "received": -1}, ToScheduler),
        ({"type": "Ready", "settings": {**SETTINGS, "slice_size": 0}}, ToScheduler),
        ({"type": "Ready", "settings": {**SETTINGS, "slice_size": 2**28 + 1}}, ToScheduler),
        ({"type": "Ready", "settings": {**SETTINGS, "placement": "x" * 257}}, ToScheduler),
        ({"type": "Ready", "settings": {**SETTINGS, "consistency": "x" * 257}}, ToScheduler),
        ({"type": "DataHello", "rank": 0, "settings": {**SETTINGS, "slice_size": 0}}, DataHello),
        ({"type": "NewTerms", "terms": {"type": "Terms", "slice_size": 0}}, FromScheduler),
        ({"type": "Terms", "slice_size": 9, "credit_size": 0}, SliceSizes),
        ({"type": "AskTime", "asked_ns": -1}, ToScheduler),
        (
            {"type": "TimeTold", "asked_ns": 0, "received_ns": 2**62 + 1, "sent_ns": 0},
            FromScheduler,
        ),
        ({"type": "FirstSliceSize", "slice_size": -1}, FromScheduler),
        ({"type": "Terms", "slice_size": 2**28 + 1}, SliceSizes),
        ({**DECLARED, "shape": [2], "layout": "x" * 65}, ToScheduler),
        ({**KNOWN, "key_id": -1}, FromScheduler),
        ({**KNOWN, "runs": [[0, 4], [1, 0]]}, FromScheduler),
        ({**KNOWN, "shape": [4], "members": [{"key": 1, "shape": [4]}]}, FromScheduler),
        ({**KNOWN, "shape": [4], "members": [{"key": 1, "shape": [1]}] * 2}, FromScheduler),
        ({**KNOWN, "shape": [33], "members": [{"key": 1, "shape": [1]}] * 33}, FromScheduler),
        ({**KNOWN, "shape": [0], "members": [{"key": 1, "shape": [-1]}] * 2}, FromScheduler),
        ({"type": "Roster", "rank": 0, "token": b"", "servers": [], "workers": []}, FromScheduler),
        ({**KNOWN, "shape": [2**40], "runs": [[0, 2**40]]}, DeclaredKey),
        ({**KNOWN, "shape": [-2, -2]}, DeclaredKey),
        ({**KNOWN, "runs": [[0, 3]]}, DeclaredKey),
        ({**KNOWN, "runs": []}, DeclaredKey),
        ({**KNOWN, "runs": [[0, 2], [0, 2]]}, DeclaredKey),
        ({**KNOWN, "runs": [[-1, 4]]}, DeclaredKey),
        ({**KNOWN, "runs": [[2**16, 4]]}, DeclaredKey),
        ({**KNOWN, "runs": [[0, -2], [1, 6]]}, DeclaredKey),
        ({**KNOWN, "layout": "x" * 65}, DeclaredKey),
        (by_codec(LONG), DeclaredKey),
        (by_codec("2bit", {LONG: 1}), DeclaredKey),
        (by_codec("2bit", {"threshold": LONG}), DeclaredKey),
        (by_codec("2bit", {"threshold": [1]}), DeclaredKey),
        (by_codec("2bit", {"threshold": None}), DeclaredKey),
        (by_codec("2bit", {1: 0.5}), DeclaredKey),
        (by_codec("2bit", {}, 5), DeclaredKey),
        (
            {"type": "OptimizerSettings", "front_end": "x" * 65, "settings": b""},
            OptimizerSettings,
        ),
    ],
    ids=str,
)
def test_a_number_that_nobody_can_compute_with_is_a_protocol_error(
    wrong: dict, expected: Any
) -> None:
    with pytest.raises(ProtocolError) as told:
        decode(msgspec.msgpack.encode(wrong), expected)
    assert "missing" not in str(told.value)


def test_a_codec_travels_as_its_name_and_plain_parameters() -> None:
    layout = decode(msgspec.msgpack.encode(by_codec("2bit", {"threshold": 0.25})), DeclaredKey)
    assert layout.codecs.gradients == Choice("2bit", {"threshold": 0.25})
    assert str(layout.codecs.gradients) == "'2bit' (threshold=0.25)"


class _Long(bytes):
    """As long as it says, with nothing in it: the cap must be seen before anything is read."""

    def __len__(self) -> int:
        return MAX_MESSAGE_BYTES + 1


def test_a_message_over_the_cap_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
        decode(_Long(encode(DeclareKey("w", (2,), "float32"))), ToScheduler)


class _Evil:
    """Pickled, it makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_a_protocol_error_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    folder = tmp_path / "made by a pickle"
    data = pickle.dumps(_Evil(folder), protocol)
    for expected in EXPECTED:
        with pytest.raises(ProtocolError):
            decode(data, expected)
    assert not folder.exists()
    pickle.loads(data)  # noqa: S301  it would have
    assert folder.exists()


def test_no_module_uses_what_can_unpickle() -> None:
    """Packages that do, and the methods of sockets, files and connections that do. `p3kv.ddp` runs
    the script that it is given."""
    packages = {
        "pickle",
        "_pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
    }
    packages |= {"multiprocessing.connection", "multiprocessing.managers"}
    names = {"recv_pyobj", "recv_serialized", "allow_pickle", "Unpickler", "eval", "exec"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                used = {getattr(node, field, None) for field in ("attr", "id", "arg")}
            used -= {"exec"} if path == PACKAGE / "ddp.py" else set()
            assert not used & (packages | names), (path, getattr(node, "lineno", None))


def test_a_process_of_another_version_can_read_that_it_is_refused_and_why() -> None:
    """However the messages may have changed: both know these names, and skip what they do not."""
    said = hello("worker", protocol=PROTOCOL_VERSION + 1, version="9.9", process=b"")
    theirs = msgspec.to_builtins(said, builtin_types=(bytes,))
    assert {"type": "Hello", "protocol": PROTOCOL_VERSION + 1, "version": "9.9"}.items() <= (
        theirs.items()
    )
    data = msgspec.msgpack.encode({**theirs, "colour": "red"})
    ((_, refused),) = Job(NAME, 1, 1).handle(b"x", decode(data, ToScheduler))
    answer = msgspec.msgpack.decode(encode(refused))
    assert answer.keys() == {"type", "reason"}
    assert answer["type"] == "Refused"
    for word in (f"protocol {PROTOCOL_VERSION}", f"speaks {PROTOCOL_VERSION + 1}", "p3kv 9.9"):
        assert word in answer["reason"]
    assert decode(msgspec.msgpack.encode({**answer, "colour": "red"}), FromScheduler) == refused


def test_every_message_is_of_a_union_or_of_a_frame_and_decoded_there() -> None:
    """One that is declared, sent and forgotten where it arrives would end the job."""
    classes = [c for c in vars(messages).values() if isinstance(c, type)]
    declared = {c for c in classes if issubclass(c, messages.Message)} - {messages.Message}
    expected = {
        "ToScheduler": set(typing.get_args(ToScheduler)),
        "FromScheduler": set(typing.get_args(FromScheduler)),
        **{kind.__name__: {kind} for kind in declared},
    }
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    decoded = set().union(
        *(
            kinds
            for name, kinds in expected.items()
            if re.search(rf"decode\(.*, {name}[,)]|_message\({name}[,)]", source)
        )
    )
    inside = {
        kind
        for message in decoded
        for field in typing.get_type_hints(message).values()
        for kind in (field, *typing.get_args(field))
        if kind in declared
    }
    assert declared == decoded | inside


CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, P3Error)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_failure_raises_the_error_it_names_and_says_who_and_when(kind: type) -> None:
    error = Failure("it stopped.", "worker", 3, 17, kind.__name__).to_error()
    assert type(error) is kind
    assert str(error) == "worker 3 (round 17): it stopped."


def test_a_failure_says_nothing_of_what_is_not_known() -> None:
    assert str(Failure("it stopped.", "scheduler", messages.UNKNOWN).to_error()) == (
        "scheduler: it stopped."
    )


@pytest.mark.parametrize("name", ["SystemExit", "annotations", "__file__", "KeyError", ""])
def test_a_failure_raises_nothing_but_errors_of_p3kv(name: str) -> None:
    assert type(Failure("it stopped.", "worker", 0, error=name).to_error()) is P3Error
