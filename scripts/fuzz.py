"""Coverage-guided fuzzing of all that reads bytes from outside. Needs atheris, which p3kv does not.

    pip install atheris
    python -m scripts.fuzz TARGET [CORPUS] [-max_total_time=600]

Each function of `TARGETS` is a target: it takes bytes, and raises only where p3kv would. What
follows its name is for libFuzzer, for example a folder that keeps what has reached new code.
"""

from __future__ import annotations

import logging
import socket
import sys
import zipfile
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable, Dict, List, Mapping, Type

import atheris

with atheris.instrument_imports(include=["p3kv"]):
    import msgspec

    from p3kv.checkpoints import newest
    from p3kv.checkpoints.outline import OUTLINE
    from p3kv.config import Launch, Settings, optimizer_modules, plugins, unknown_variables
    from p3kv.errors import CheckpointError, ConfigError, P3Error, ProtocolError
    from p3kv.processes.launcher.output import LineSplitter
    from p3kv.wire.fields import RoundHeader
    from p3kv.wire.header import HEADER_BYTES, MAGIC, Kind, unpack_header
    from p3kv.wire.launcher_link import Cause, LauncherLink, PartEnded
    from p3kv.wire.messages import (
        PROTOCOL_VERSION,
        UNKNOWN,
        AskTime,
        DataHello,
        DeclaredKey,
        FromScheduler,
        OptimizerSettings,
        SliceSizes,
        StateOutline,
        ToScheduler,
        decode,
    )
    from p3kv.wire.messages.base import MAX_DEPTH, is_too_deep
    from p3kv.wire.states import ArrivingState
    from tests.checkpoints.test_checkpoint_files import HERE, path_of, save
    from tests.in_memory import MemoryJob
    from tests.scheduled import running, server, worker
    from tests.served import frame, own_fields, packed
    from tests.wire.test_fuzz import MESSAGES, SIZE, SLICE_SIZE, encode, fail, hear, trained

_NUMBERS = (0, 1, 2, 3, 5, SIZE, 2**16 - 1, 2**31, 2**32 - 1)
_SIZES = (0, 4, 4 * SLICE_SIZE, 4 * (SIZE % SLICE_SIZE), 4 * SIZE, 2**32 - 1)


def _number(data: atheris.FuzzedDataProvider) -> int:
    if data.ConsumeBool():
        return int(data.PickValueInList(list(_NUMBERS)))
    return int(data.ConsumeIntInRange(0, 2**32 - 1))


def _frame(data: atheris.FuzzedDataProvider) -> bytes:
    """A frame with a header of any numbers, and any payload, a message, or part of one."""
    kind = data.PickValueInList([*Kind, 0, 255])
    what = data.ConsumeIntInRange(0, 3)
    if what == 0:
        payload = data.ConsumeBytes(data.ConsumeIntInRange(0, 200))
    elif what == 1:
        payload = bytes(data.PickValueInList(list(_SIZES[:-1])))
    else:
        payload = bytearray(encode(data.PickValueInList(MESSAGES)))
        if what == 3:
            for _ in range(data.ConsumeIntInRange(1, 4)):
                payload[data.ConsumeIntInRange(0, len(payload) - 1)] = data.ConsumeIntInRange(
                    0, 255
                )
    size = len(payload) if data.ConsumeProbability() < 0.9 else _number(data)
    fields = {
        name: data.ConsumeIntInRange(-(2**31), 2**31 - 1) if name == "priority" else _number(data)
        for name in own_fields(kind)
    }
    flags = data.ConsumeIntInRange(0, 255)
    return packed(kind, _number(data) & 3, size, flags=flags, **fields) + bytes(payload)


def _frames(data: atheris.FuzzedDataProvider) -> List[bytes]:
    return [_frame(data) for _ in range(data.ConsumeIntInRange(1, 6))]


def worker_to_server(words: bytes) -> None:
    """A member of the job says anything to a server that trains."""
    data = atheris.FuzzedDataProvider(words)
    with closing(MemoryJob(2, 1, SLICE_SIZE)) as job:
        trained(job)
        one = job.servers[0]
        one.dispatcher._fail = one.consumer._fail = one.consumer.states._fail = fail
        sender = job.workers[data.ConsumeIntInRange(0, 1)].servers[0]
        receiver = job._connections[sender._link.other]
        hear(job, sender, receiver, _frames(data), one.consumer.consume)


def server_to_worker(words: bytes) -> None:
    """A server says anything to a worker that trains."""
    data = atheris.FuzzedDataProvider(words)
    with closing(MemoryJob(2, 1, SLICE_SIZE)) as job:
        trained(job)
        receiver = job.workers[1].servers[0]
        sender = job._connections[receiver._link.other]
        hear(job, sender, receiver, _frames(data), lambda: None)


def stranger_to_server(words: bytes) -> None:
    """Somebody who has no secret says anything to a server."""
    data = atheris.FuzzedDataProvider(words)
    with closing(MemoryJob(1, 1, SLICE_SIZE)) as job:
        link = job.servers[0].listener.connect()
        job.servers[0].workers._accept()
        connection = job.servers[0].connections[-1]
        said = data.ConsumeBytes(data.ConsumeIntInRange(0, 200))
        if data.ConsumeBool():
            said = frame(Kind.HELLO, 0, said, magic=MAGIC, version=PROTOCOL_VERSION)
        for part in (said, *_frames(data)):
            link.send([memoryview(part)])
            try:
                connection.receive()
            except P3Error:
                break
        assert connection not in job.servers[0].workers.connections.values()
    link.close()
    connection.close()


def node_to_scheduler(words: bytes) -> None:
    """Members of the job, or who says to be one, say any messages to the scheduler."""
    data = atheris.FuzzedDataProvider(words)
    job = running()
    for _ in range(data.ConsumeIntInRange(1, 6)):
        who = data.PickValueInList([worker(0), worker(1), server(0), server(1), b"nobody"])
        try:
            message = decode(_message(data, ToScheduler), ToScheduler)
        except ProtocolError as error:
            node = job.node(who)
            if node is not None:
                job.wrong_words(node, error)
            continue
        if not isinstance(message, AskTime):  # which does not get as far as the job
            job.handle(who, message)
        job.judge()


def scheduler_to_node(words: bytes) -> None:
    """Any bytes in the place of a message of the scheduler's."""
    with suppress(ProtocolError):
        decode(_message(atheris.FuzzedDataProvider(words), FromScheduler), FromScheduler)


def data_messages(words: bytes) -> None:
    """Any bytes in the place of a message on a data connection."""
    for expected in (DataHello, DeclaredKey, SliceSizes, OptimizerSettings, StateOutline):
        with suppress(ProtocolError):
            decode(words, expected)


def _message(data: atheris.FuzzedDataProvider, union: Any) -> bytes:
    """Any bytes, or a message of one of the types with any values."""
    if data.ConsumeBool():
        return bytes(data.ConsumeBytes(data.ConsumeIntInRange(0, 300)))
    kind: Type[msgspec.Struct] = data.PickValueInList(list(union.__args__))
    values = {name: _value(data, 3) for name in kind.__struct_fields__}
    return msgspec.msgpack.encode({"type": kind.__name__, **values})


def _value(data: atheris.FuzzedDataProvider, depth: int) -> Any:
    makers: List[Callable[[], Any]] = [
        lambda: None,
        data.ConsumeBool,
        lambda: _number(data),
        lambda: data.ConsumeIntInRange(-5, 300),
        lambda: data.ConsumeIntInRange(UNKNOWN, 3),
        data.ConsumeFloat,
        lambda: data.PickValueInList(["worker", "server", "tcp", "float32", "dense", "w", ""]),
        lambda: data.ConsumeUnicodeNoSurrogates(10),
        lambda: bytes(data.ConsumeBytes(16)),
    ]
    if depth:
        makers += [
            lambda: [_value(data, depth - 1) for _ in range(data.ConsumeIntInRange(0, 3))],
            lambda: {
                data.PickValueInList(["name", "values", "a"]): _value(data, depth - 1)
                for _ in range(data.ConsumeIntInRange(0, 2))
            },
        ]
    return makers[data.ConsumeIntInRange(0, len(makers) - 1)]()


def depth(words: bytes) -> None:
    """What is let through nests no deeper than allowed, and what is not does."""
    too_deep = is_too_deep(words)
    try:
        found = _depth(msgspec.msgpack.decode(words))
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError):
        return
    assert too_deep == (found > MAX_DEPTH)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((_depth(one) for pair in value.items() for one in pair), default=0)
    if isinstance(value, (list, tuple)):
        return 1 + max(map(_depth, value), default=0)
    return 0


def states(words: bytes) -> None:
    """An optimizer's state in frames of any sizes."""
    data = atheris.FuzzedDataProvider(words)
    with suppress(ProtocolError):
        outline = decode(data.ConsumeBytes(data.ConsumeIntInRange(0, 200)), StateOutline)
        arriving = ArrivingState(outline, 1000, data.ConsumeBool())
        while not arriving.complete:
            arriving.land(RoundHeader(Kind.STATE_BYTES, 0, payload_bytes=_number(data)))


def header(words: bytes) -> None:
    """Any bytes in the place of a header."""
    if len(words) >= HEADER_BYTES:
        with suppress(ProtocolError):
            unpack_header(memoryview(words), 0)


def launcher_link(words: bytes) -> None:
    """Any bytes between the launcher and its scheduler."""
    for expected in (PartEnded, Cause):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(words)
            theirs.close()
            link: LauncherLink[Any] = LauncherLink(ours, expected)
            while link.receive():
                pass


def launcher_output(words: bytes) -> None:
    """What processes print, cut anywhere, gives the same lines."""
    data = atheris.FuzzedDataProvider(words)
    text = data.ConsumeBytes(100)
    cut = data.ConsumeIntInRange(0, len(text))
    whole, parts = LineSplitter(), LineSplitter()
    lines = [one for one in [*whole.feed(text), *whole.end()] if one.final]
    cuts = [*parts.feed(text[:cut]), *parts.feed(text[cut:]), *parts.end()]
    assert [one for one in cuts if one.final] == lines, (text, cut)


_VARIABLES = [
    *(f"P3KV_{name.upper()}" for name in Settings.__dataclass_fields__), "DMLC_ROLE",
    "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID",
    "DMLC_TASK_ID", "DMLC_NODE_HOST", "DMLC_INTERFACE", "P3KV_SECRET", "P3KV_SECRET_FILE",
    "P3KV_JOB", "P3KV_SCHEDULER_FD", "P3KV_LAUNCHER_FD", "P3KV_LAUNCHED", "P3KV_PLUGINS",
    "P3KV_OPTIMIZERS", "P3KV_TOLD", "SLURM_PROCID", "PS_VERBOSE",
]  # fmt: skip
_RIGHT = {
    "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2",
}  # fmt: skip


def environment(words: bytes) -> None:
    """Any environment gives settings and a role, or one error that can be printed."""
    data = atheris.FuzzedDataProvider(words)
    environ: Dict[str, str] = dict(_RIGHT)
    for _ in range(data.ConsumeIntInRange(1, 4)):
        name = data.PickValueInList(_VARIABLES)
        if data.ConsumeProbability() < 0.1:
            name = "P3KV_" + _text(data)
        environ[name] = _text(data)
    readers: List[Callable[[Mapping[str, str]], Any]] = [
        Settings.from_environment, Launch.from_environment, unknown_variables, plugins,
        optimizer_modules,
    ]  # fmt: skip
    for warning in unknown_variables(environ).values():
        assert warning.isprintable(), warning
    for read in readers:
        try:
            read(environ)
        except ConfigError as error:
            assert str(error).isprintable() and str(error).encode(), error


def _text(data: atheris.FuzzedDataProvider) -> str:
    """As os.environ has it: of bytes without zeros, those that are no UTF-8 as surrogates."""
    if data.ConsumeBool():
        return str(
            data.PickValueInList(["1", "0", "-1", "1e9", "nan", "inf", "\u0663", "true", ""])
        )
    words = data.ConsumeBytes(data.ConsumeIntInRange(0, 20))
    return bytes(words).replace(b"\0", b"").decode("utf-8", "surrogateescape")


_FOLDER = TemporaryDirectory()


def checkpoint_files(words: bytes) -> None:
    """A checkpoint of two files, of which one has other bytes, or other members with the right
    checksums."""
    data, folder = atheris.FuzzedDataProvider(words), Path(_FOLDER.name)
    path = path_of(folder, 4, data.ConsumeIntInRange(0, 1))
    save(folder, 4, 0, 1)
    if data.ConsumeBool():
        content = bytearray(path.read_bytes())
        for _ in range(data.ConsumeIntInRange(1, 4)):
            content[data.ConsumeIntInRange(0, len(content) - 1)] = data.ConsumeIntInRange(0, 255)
        path.write_bytes(content[: data.ConsumeIntInRange(0, len(content))] or content)
    else:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        changed = str(data.PickValueInList([OUTLINE, *members]))
        member = bytearray(members[changed])
        for _ in range(data.ConsumeIntInRange(1, 4)):
            place = data.ConsumeIntInRange(0, len(member))
            member[place : place + data.ConsumeIntInRange(0, 3)] = data.ConsumeBytes(3)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {**members, changed: bytes(member)}.items():
                archive.writestr(name, content)
    with suppress(CheckpointError):
        saved = newest(str(folder), HERE)
        if saved is not None:
            for store, key in ((0, "w"), (1, 7)):
                if saved.outline(store, key) is not None:
                    saved.key(store, key)


TARGETS = {
    target.__name__: target
    for target in (
        worker_to_server, server_to_worker, stranger_to_server, node_to_scheduler,
        scheduler_to_node, data_messages, depth, states, header, launcher_link, launcher_output,
        environment, checkpoint_files,
    )
}  # fmt: skip


def main() -> None:
    target = TARGETS.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if target is None:
        sys.exit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")
    logging.disable()  # what is refused is logged
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
