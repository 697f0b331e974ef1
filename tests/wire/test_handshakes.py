"""Whoever does not belong to a job gets nothing from it and can't disturb it."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Deque, Dict, List, Optional

import msgspec
import psutil
import pytest
import zmq

from p3kv.common.version import VERSION
from p3kv.transport.tls import make_knock
from p3kv.wire.credentials import HELLO_BYTES, NONCE_BYTES, Credentials
from p3kv.wire.header import HEADER_BYTES, MAGIC, Kind
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Abort,
    Bye,
    Failure,
    Hello,
    JobSettings,
    Ready,
    Refused,
    ReportFailure,
    decode,
    encode,
)
from tests.jobs import (
    JOIN,
    SECRET,
    SUMS_ONLY,
    TrainingJob,
    connections_of,
    end,
    eventually,
    held_port,
    output_of,
    results,
    start_role,
)
from tests.served import Served, frame, packed
from tests.served import hello as hello_of_a_worker

REFUSED_S = 60.0
HTTP = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n"
NOISE = bytes(range(1, 256)) * 8


def port_of(part: psutil.Process) -> int:
    """The only port on which a process listens."""
    eventually(lambda: len(connections_of(part.pid, psutil.CONN_LISTEN)) == 1)
    port: int = connections_of(part.pid, psutil.CONN_LISTEN)[0][0]
    return port


def knock(port: int, words: bytes) -> socket.socket:
    """Connects, says something and stays."""
    stranger = socket.create_connection(("127.0.0.1", port), timeout=REFUSED_S)
    stranger.sendall(words)
    return stranger


CARELESS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
CARELESS.check_hostname, CARELESS.verify_mode = False, ssl.CERT_NONE


def knock_inside_tls(port: int, words: bytes, secret: str) -> socket.socket:
    """As `knock`, of somebody who has seen a worker knock."""
    name = make_knock(Credentials(secret.encode()).transport_key())
    stranger = CARELESS.wrap_socket(knock(port, b""), server_hostname=name)
    stranger.sendall(words)
    return stranger


# The servers' ports.


def hello(payload: bytes, magic: int = MAGIC, version: int = PROTOCOL_VERSION) -> bytes:
    return frame(Kind.HELLO, 0, payload, magic=magic, version=version)


NO_TEXT = b"\x81\xa4type\xa5\xff\xff\xff\xff\xff"


def nested(kind: str) -> bytes:
    """A message with an unknown field that no reader can follow to its end."""
    return b"\x82\xa4type" + msgspec.msgpack.encode(kind) + b"\xa4more" + b"\x91" * 3500


def tls_hello(name: Optional[str] = None) -> bytes:
    """What a client of TLS says first."""
    said = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        CARELESS.wrap_bio(ssl.MemoryBIO(), said, server_hostname=name).do_handshake()
    return said.read()


FALSE_HELLO = bytes(range(HELLO_BYTES))
HUGE = 2**32 - 1
TO_A_SERVER = {
    "an HTTP request": HTTP,
    "noise": NOISE,
    "silence": b"",
    "half a hello": hello(FALSE_HELLO)[:20],
    "a hello without its payload": hello(FALSE_HELLO)[:-1],
    "a hello of another version": hello(FALSE_HELLO, version=PROTOCOL_VERSION + 1),
    "a hello of another protocol": hello(FALSE_HELLO, magic=MAGIC + 1),
    "a hello with a wrong proof": hello(FALSE_HELLO),
    "a hello without a proof": hello(FALSE_HELLO[:NONCE_BYTES]),
    "a hello without anything": hello(b""),
    "a hello that can't be read": hello(b"\x00" * 40),
    "a hello whose text is none": hello(NO_TEXT.ljust(HELLO_BYTES)),
    "a nested hello": hello(nested("DataHello")[:HELLO_BYTES]),
    "a proof without a hello": frame(Kind.PROOF, 0, bytes(40)),
    "a huge hello": packed(Kind.HELLO, 0, HUGE, magic=MAGIC, version=PROTOCOL_VERSION),
    "a hello that is a little too long": hello(b"\xc0" * (HELLO_BYTES + 1)),
    "a huge slice": packed(Kind.PUSH, 0, HUGE),
    "a slice without a hello": frame(Kind.PUSH, 0, bytes(4), round=1),
    "an optimizer without a hello": frame(Kind.OPTIMIZER, 0, b"\x80"),
    "a goodbye without a hello": frame(Kind.BYE, 1),
    "a hello of TLS": tls_hello(),
    "a hello of TLS for another host": tls_hello("www.example.org"),
    "a hello of TLS with a wrong knock": tls_hello(make_knock(bytes(32))),
    "half a hello of TLS": tls_hello()[:100],
    "a hello of TLS and noise": tls_hello() + NOISE,
    "a huge record of TLS": b"\x16\x03\x01\xff\xff" + bytes(70_000),
}


def told_before_the_end(stranger: socket.socket) -> bytes:
    """What a stranger is told until its peer ends the connection; fails if it does not."""
    told = b""
    with suppress(ConnectionResetError):
        while True:
            received = stranger.recv(4096)
            if not received:
                break
            told += received
    return told


# The scheduler's port.

ZMTP_GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + b"\x00" * 32
ZMTP_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
TO_THE_SCHEDULER = {
    "an HTTP request": HTTP,
    "noise": NOISE,
    "silence": b"",
    "half a greeting": ZMTP_GREETING[:11],
    "a greeting and noise": ZMTP_GREETING + NOISE,
    "a huge message": ZMTP_GREETING + ZMTP_READY + b"\x02" + struct.pack(">Q", 2**62),
    "a rather large message": ZMTP_GREETING + ZMTP_READY + b"\x02" + struct.pack(">Q", 2**24),
}


NO_SECRET, ANOTHER_SECRET = "a stranger without a secret", "a stranger with another secret"
OWN_KEYS = "a stranger that knows the scheduler's public key only"
UNANSWERED = (
    "noise", "nothing", "many parts", "no text", "a nested hello", "a message of no kind",
    NO_SECRET, ANOTHER_SECRET, OWN_KEYS,
)  # fmt: skip


def false_hello(**changes: object) -> Hello:
    fields = {
        "protocol": PROTOCOL_VERSION,
        "version": VERSION,
        "job": "another job",
        "role": "worker",
        "rank": 0,
        "host": "127.0.0.1",
        "port": 0,
        "pid": os.getpid(),
        "transport": "",
        "process": os.urandom(TOKEN_BYTES),
    }
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def ask_the_scheduler(port: int, job: str, secret: str) -> Dict[str, List[bytes]]:
    """What is answered to whoever speaks ZeroMQ and knows the secret, but does not belong to the
    job; and to one that does not know it. Each asks on a connection of its own."""
    end_of_job = Failure("the job shall end", "worker", 0)
    questions = {
        "noise": [NOISE],
        "nothing": [b""],
        "many parts": [b"a", b"b", b"c"],
        "no text": [NO_TEXT],
        "a nested hello": [nested("Hello")],
        "a message of no kind": [b"\x81\xa4type\xa5Nobody"],
        "ready without a hello": [encode(Ready(JobSettings(7, True)))],
        "a failure without a hello": [encode(ReportFailure(end_of_job))],
        "a goodbye without a hello": [encode(Bye())],
        "another job's worker": [encode(false_hello())],
        "another version": [encode(false_hello(job=job, protocol=PROTOCOL_VERSION + 1))],
        "another role": [encode(false_hello(job=job, role="boss"))],
        "one worker too many": [encode(false_hello(job=job))],
        NO_SECRET: [encode(false_hello(job=job, role="boss"))],
        ANOTHER_SECRET: [encode(false_hello(job=job, role="boss"))],
        OWN_KEYS: [encode(false_hello(job=job, role="boss"))],
    }
    answers = {}
    context = zmq.Context()
    try:
        dealers = {}
        for name, question in questions.items():
            dealers[name] = context.socket(zmq.DEALER)
            dealers[name].linger = 0
            if name != NO_SECRET:
                shown = SECRET if name == ANOTHER_SECRET else secret
                Credentials(shown.encode()).protect_dealer(dealers[name])
            if name == OWN_KEYS:
                dealers[name].curve_publickey, dealers[name].curve_secretkey = zmq.curve_keypair()
            dealers[name].connect(f"tcp://127.0.0.1:{port}")
            dealers[name].send_multipart(question)
        for name, dealer in dealers.items():
            answers[name] = dealer.recv_multipart() if dealer.poll(1000) else []
    finally:
        context.destroy()
    return answers


def start_intruders(port: int, job: str, secret: str) -> Dict[str, subprocess.Popen]:
    """Workers of p3kv that the job does not have."""
    return {
        "stranger": start_role("worker", JOIN, port, 2, 2, P3KV_JOB=job),
        "wrong job": start_role(
            "worker", JOIN, port, 2, 2, P3KV_JOB="another job", P3KV_SECRET=secret
        ),
        "worker 2": start_role("worker", JOIN, port, 2, 2, P3KV_JOB=job, P3KV_SECRET=secret),
    }


@pytest.mark.long
@pytest.mark.parametrize("encrypt", [0, 1])
def test_training_goes_on_to_the_right_result_while_others_connect(
    tmp_path: Path, encrypt: int
) -> None:
    settings = {"P3KV_VERBOSE": 1, "P3KV_TRACE": tmp_path / "trace", "P3KV_ENCRYPT": encrypt}
    with TrainingJob(tmp_path, 2, 2, **settings) as job:
        job.wait_until_training()
        parts = job.parts()
        place = parts["scheduler"].environ()
        secret = place["P3KV_SECRET"]
        launcher = psutil.Process(job.launcher.pid)
        shown = [
            " ".join(process.cmdline())
            for process in (launcher, *launcher.children(recursive=True))
        ]
        data_ports = [port_of(parts[name]) for name in ("server 0", "server 1")]
        start = time.monotonic()
        to_servers = {
            (name, port): knock(port, words)
            for name, words in TO_A_SERVER.items()
            for port in data_ports
        }
        if encrypt:
            for name, words in (("silence", b""), ("a wrong proof", hello(FALSE_HELLO))):
                stranger = knock_inside_tls(data_ports[0], words, secret)
                to_servers[f"{name} inside TLS", 0] = stranger
        scheduler_port = int(place["DMLC_PS_ROOT_PORT"])
        to_scheduler = {
            name: knock(scheduler_port, words) for name, words in TO_THE_SCHEDULER.items()
        }
        intruders = start_intruders(scheduler_port, place["P3KV_JOB"], secret)

        answers = ask_the_scheduler(scheduler_port, place["P3KV_JOB"], secret)
        for name in UNANSWERED:
            assert answers[name] == [], name
        for name, words in {
            "ready without a hello": "say Hello first",
            "a failure without a hello": "say Hello first",
            "a goodbye without a hello": "say Hello first",
            "another job's worker": "runs another job",
            "another version": "install the same p3kv everywhere",
            "another role": "no role 'boss'",
            "one worker too many": "the job has its 2 workers already",
        }.items():
            assert words in decode(answers[name][0], Refused).reason
            assert place["P3KV_JOB"].encode() not in answers[name][0]

        for stranger in to_servers.values():
            assert told_before_the_end(stranger) == b""
        for name in ("silence", "half a greeting", "a huge message", "a rather large message"):
            told_before_the_end(to_scheduler[name])
        assert time.monotonic() - start < REFUSED_S
        refused = results(intruders, start, REFUSED_S)
        assert "refuses this process" in refused["stranger"].output
        assert "runs another job" in refused["wrong job"].output
        assert "the job has its 2 workers already" in refused["worker 2"].output
        assert place["P3KV_JOB"] not in "".join(result.output for result in refused.values())
        assert {result.code for result in refused.values()} == {1}

        crowd = [knock(data_ports[0], b"") for _ in range(300)]
        assert job.launcher.poll() is None, job.output()
        for stranger in (*to_servers.values(), *to_scheduler.values(), *crowd):
            stranger.close()
        job.stop()
        result = job.result(timeout_s=REFUSED_S)
    assert result.code == 0, result.output
    for rank in range(2):
        assert "all weights are right" in result.said_by(f"worker {rank}")
    for name in ("server 0", "server 1", "scheduler"):
        assert "refused a connection" in result.said_by(name)
    shown += [result.output, *(path.read_text() for path in (tmp_path / "trace").iterdir())]
    assert len(shown) > 8
    assert not any(secret in text for text in shown)


def test_a_job_comes_together_while_foreign_connections_come_and_go() -> None:
    done = threading.Event()
    knocks = []

    def come_and_go(port: int, words: bytes) -> None:
        while not done.wait(0.001):
            with suppress(OSError):
                knock(port, words).close()
                knocks.append(words)

    with held_port() as holder:
        port = holder.getsockname()[1]
        strangers = [
            threading.Thread(target=come_and_go, args=(port, words))
            for words in TO_THE_SCHEDULER.values()
        ]
        for stranger in strangers:
            stranger.start()
        start = time.monotonic()
        processes = {
            f"{role} {rank}": start_role(role, JOIN, port, workers=3, servers=3, **SUMS_ONLY)
            for role, count in (("scheduler", 1), ("server", 3), ("worker", 3))
            for rank in range(count)
        }
        try:
            ended = results(processes, start, timeout_s=REFUSED_S)
        finally:
            done.set()
            for stranger in strangers:
                stranger.join()
            for process in processes.values():
                end(process)
    assert knocks
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"


@pytest.mark.parametrize("kind", ["dist_sync", "dist_sync_p3"])
def test_a_worker_with_mxnet_s_own_store_is_named_and_does_no_harm(kind: str) -> None:
    foreign = [sys.executable, "-c", f"import mxnet as mx; mx.kv.create({kind!r})"]
    with held_port() as holder:
        port = holder.getsockname()[1]
        start = time.monotonic()
        processes = {"scheduler": start_role("scheduler", JOIN, port, P3KV_RENDEZVOUS_TIMEOUT_S=30)}
        stranger = start_role("worker", foreign, port)
        try:
            said = processes["scheduler"].stdout
            assert said is not None and select([said], [], [], REFUSED_S)[0]
            warning = said.readline()
            while "p3kv scheduler: waiting for" in warning:  # until the stranger has imported MXNet
                warning = said.readline()
            processes["server"] = start_role("server", JOIN, port, **SUMS_ONLY)
            processes["worker"] = start_role("worker", JOIN, port)
            ended = results(processes, start, timeout_s=REFUSED_S)
        finally:
            for process in (stranger, *processes.values()):
                end(process)
            stranger.communicate()
    # Its address is not known if it has hung up already.
    for words in ("a process on", "MXNet's own store", "'import p3kv'", "kvstore='p3'"):
        assert words in warning
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"


def processor_time_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_a_server_without_descriptors_rests_and_lets_workers_in_when_it_has_some_again() -> None:
    served = Served(workers=1)
    crowd: List[socket.socket] = []
    try:
        port = served.welcome()[1]
        server = psutil.Process(served.process.pid)
        highest = server.rlimit(psutil.RLIMIT_NOFILE)[1]
        server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds() + 5, highest))
        crowd = [knock(port, b"") for _ in range(20)]
        eventually(lambda: len(connections_of(server.pid, psutil.CONN_ESTABLISHED)) >= 5)
        busy_s, waited_s = processor_time_s(server), 1.5
        time.sleep(waited_s)
        busy_s = processor_time_s(server) - busy_s
        assert busy_s < waited_s / 4, f"{busy_s} s of {waited_s} s"
        worker = knock(port, hello_of_a_worker(0))
        for stranger in crowd:
            stranger.close()
        crowd.append(worker)
        assert len(worker.recv(HEADER_BYTES, socket.MSG_WAITALL)) == HEADER_BYTES
        served.say(Abort(Failure("the test is done.", "worker", 0)))
        output = output_of(served.process, REFUSED_S)
    finally:
        for stranger in crowd:
            stranger.close()
        served.close()
    assert output is not None and output.count("no room for more connections") == 1, output


MOST_FLOODING = 100_000


def flood(ports: List[int], done: threading.Event, counts: List[int]) -> None:
    """Makes connections that say nothing as fast as it can, and keeps the last few hundred."""
    kept: Deque[socket.socket] = deque()
    while not done.is_set() and counts[0] < MOST_FLOODING:
        for port in ports:
            stranger = socket.socket()
            stranger.setblocking(False)
            # Nobody has to remember a connection that is reset.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.connect_ex(("127.0.0.1", port))
            kept.append(stranger)
            counts[0] += 1
        while len(kept) > 400:
            kept.popleft().close()
    for stranger in kept:
        stranger.close()


@pytest.mark.parametrize("encrypt", [0, pytest.param(1, marks=pytest.mark.long)])
def test_workers_find_their_way_through_thousands_of_silent_connections(encrypt: int) -> None:
    place = {**SUMS_ONLY, "P3KV_ENCRYPT": encrypt}
    done = threading.Event()
    with held_port() as holder:
        port = holder.getsockname()[1]
        start = time.monotonic()
        processes = {
            name: start_role(name.split()[0], JOIN, port, workers=3, servers=2, **place)
            for name in ("scheduler", "server 0", "server 1")
        }
        counts = [0]
        strangers: List[threading.Thread] = []
        try:
            parts = [psutil.Process(processes[name].pid) for name in ("server 0", "server 1")]
            ports = [port_of(part) for part in parts]
            strangers = [threading.Thread(target=flood, args=(ports, done, counts))]
            for stranger in strangers:
                stranger.start()
            eventually(lambda: counts[0] > 2000)
            for rank in range(3):
                processes[f"worker {rank}"] = start_role("worker", JOIN, port, 3, 2, **place)
            ended = results(processes, start, timeout_s=REFUSED_S)
        finally:
            done.set()
            for stranger in strangers:
                stranger.join()
            for process in processes.values():
                end(process)
    print(f"{counts[0]} strangers, {time.monotonic() - start:.1f} s")
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
