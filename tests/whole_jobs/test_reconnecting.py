"""Connections that are reset again and again, in jobs of real processes: nothing is lost."""

from __future__ import annotations

import re
import select
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from shutil import which
from typing import Dict, List, Tuple

import pytest

from p3kv.transport import Link, Tcp
from p3kv.wire.connection import Connection
from p3kv.wire.credentials import NONCE_BYTES
from p3kv.wire.header import Kind
from p3kv.wire.messages import TOKEN_BYTES, Abort, Failure, LinkEnded, ReportFailure
from p3kv.wire.protocol import Conversation, Phase, Rule
from p3kv.worker.joining import LONGEST_DELAY_S
from tests.handling import Nobody
from tests.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SUMS_ONLY,
    TrainingJob,
    eventually,
    held_port,
    results,
    run_job,
    start_role,
)
from tests.served import TOLD_S, Served, Serving, frame, hello, proof, received, welcome

RESETTING = {
    "P3KV_TRANSPORT": "resetting",
    "P3KV_PLUGINS": "resetting",
}
CHECKED: Dict[str, Tuple[List[object], int, Dict[str, object]]] = {
    "rows.py": ([20], 80_000, {}),
    "asynchronous.py": ([], 20_000, {"P3KV_SLICE_SIZE": 150}),
    "unequal.py": (
        [], 30_000,
        {"P3KV_LET_WORKERS_LEAVE": 1, "P3KV_DETERMINISTIC": 1, "P3KV_SLICE_SIZE": 500},
    ),
    "resumed.py": (
        ["saves"], 100_000,
        {"P3KV_DETERMINISTIC": 1, "P3KV_SLICE_SIZE": 40, "P3KV_OPTIMIZERS": "own_mxnet_optimizers"},
    ),
}  # fmt: skip
"""Scripts that compare with one process, bit for bit: their arguments, and how much a link carries
before it is reset, at most. The first measures the network, too."""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("rows.py", marks=pytest.mark.long),
        "asynchronous.py",
        pytest.param("unequal.py", marks=pytest.mark.long),
        pytest.param("resumed.py", marks=pytest.mark.long),
    ],
)
def test_a_job_whose_data_connections_are_reset_trains_as_if_they_were_not(
    tmp_path: Path, script: str
) -> None:
    arguments, most_bytes, settings = CHECKED[script]
    workers = 3 if script == "unequal.py" else 2
    result = run_job(
        script, [tmp_path, *arguments], workers, 2,
        TEST_RESET_BYTES=most_bytes, **RESETTING, **settings,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("a link ends") > 10, result.output
    # Each end of a connection tells people once a minute.
    told, ends = result.output.count("has a new connection to this process"), 2 * workers * 2
    assert 1 <= told <= ends * (1 + result.seconds / 60), result.output


def reset_all_of(pids: List[int]) -> int:
    """Resets all TCP connections of some processes on this host, at both ends; how many."""
    ended = 0
    listed = subprocess.run(["ss", "-Htnp"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if any(f"pid={pid}," in line for pid in pids):
            near, far = line.split()[3:5]
            subprocess.run(
                ["ss", "-K", "-tn", "src", near, "dst", far],
                check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            ended += 1
    return ended


def may_reset() -> bool:
    """Whether this system lets tests end connections of others."""
    if which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(
        listener.getsockname()
    ) as near:
        place = f"127.0.0.1:{near.getsockname()[1]}"
        subprocess.run(["ss", "-K", "-tn", "src", place], check=False, capture_output=True)
        near.settimeout(0.5)
        with suppress(TimeoutError):
            try:
                near.recv(1)
            except OSError as error:
                return not isinstance(error, TimeoutError)
    return False


@pytest.mark.skipif(not may_reset(), reason="'ss -K' can't end connections here")
@pytest.mark.parametrize("encrypts", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_job_whose_connections_to_the_scheduler_and_servers_are_reset_goes_on(
    tmp_path: Path, encrypts: int
) -> None:
    with TrainingJob(tmp_path, 2, 2, P3KV_ENCRYPT=encrypts) as job:
        job.wait_until_training()
        pids = [process.pid for process in job.parts().values()]
        counts: List[int] = []

        def reset() -> bool:
            counts.append(reset_all_of(pids))
            time.sleep(0.4)  # for most to connect again
            return len(counts) >= 8 and sum(counts) > 30

        eventually(reset, DEADLINE_S)
        assert job.launcher.poll() is None, job.output()
        job.stop()
        result = job.result(DEADLINE_S)
    assert result.code == 0, result.output
    for rank in range(2):
        assert "all weights are right" in result.said_by(f"worker {rank}")
        assert "the connection to the scheduler had ended" in result.said_by(f"worker {rank}")
    assert "has a new connection to the scheduler" in result.said_by("scheduler")


def test_a_worker_that_can_t_connect_again_ends_the_job_when_it_has_waited_long_enough(
    tmp_path: Path,
) -> None:
    with TrainingJob(
        tmp_path, 2, 1, P3KV_SILENCE_TIMEOUT_S=6, TEST_RESET_BYTES=1 << 20,
        TEST_RESET_FOR_GOOD=tmp_path / "trains-0", **RESETTING,
    ) as job:  # fmt: skip
        result = job.result(DEADLINE_S)
    assert result.code == 1, result.output
    assert "no new connection could be made for 6 s" in result.output, result.output
    assert "The job goes on when there is a new one" in result.output


# Who may go on in a worker's place.


def test_nobody_but_its_own_process_goes_on_in_a_worker_s_place() -> None:
    served = Served(1)
    links: List[socket.socket] = []

    def connected() -> socket.socket:
        links.append(socket.create_connection(address, timeout=TOLD_S))
        return links[-1]

    def told_nothing(link: socket.socket) -> bool:
        try:
            return link.recv(1) == b""
        except ConnectionResetError:
            return True

    try:
        address = served.welcome()
        first = connected()
        first.sendall(hello(0))
        said = proof(0, received(first)[1])
        first.sendall(said)
        assert received(first)[0].kind == Kind.WELCOME

        # The same words again: the challenge is another one.
        replayed = connected()
        replayed.sendall(hello(0))
        received(replayed)
        replayed.sendall(said)
        assert told_nothing(replayed)

        another = connected()
        another.sendall(hello(0))
        another.sendall(proof(0, received(another)[1], process=bytes(TOKEN_BYTES)))
        assert told_nothing(another)

        # The worker itself, of the end of whose first link the server has not heard.
        again = connected()
        again.sendall(hello(0, bytes(range(NONCE_BYTES))))
        again.sendall(proof(0, received(again)[1], bytes(range(NONCE_BYTES))))
        assert received(again)[0].kind == Kind.WELCOME
        assert told_nothing(first)

        lying = connected()
        lying.sendall(hello(0))
        lying.sendall(proof(0, received(lying)[1], had=1))
        report = served.hear()
        while isinstance(report, LinkEnded):
            report = served.hear()
        assert isinstance(report, ReportFailure)
        assert "it broke the protocol: it has received 1 bytes" in report.failure.reason
    finally:
        for link in links:
            link.close()
        served.close()


def test_a_worker_whose_job_has_failed_tries_no_more_to_connect_again() -> None:
    with closing(Serving(1, script="stays.py")) as serving:
        (link,) = serving.links()
        link.sendall(welcome(0))
        listener = serving.refuse()
        link.close()
        assert isinstance(serving.hear(), LinkEnded)
        serving.say(Abort(Failure("its process ended", "server", 0)))
        assert serving.process.stdout is not None
        assert "its process ended" in serving.process.stdout.readline()
        listener.listen()
        listener.settimeout(LONGEST_DELAY_S + 1.0)
        with pytest.raises(socket.timeout):
            listener.accept()


def test_a_process_that_ends_without_a_launcher_is_named_with_host_and_round(
    tmp_path: Path,
) -> None:
    """Though others wait a little for it to connect again."""
    steady = [sys.executable, str(SCRIPTS / "steady.py"), str(tmp_path)]
    with held_port() as holder:
        port = holder.getsockname()[1]
        parts = {
            name: start_role(role, steady, port, 2, 1, DMLC_WORKER_ID=rank, **SUMS_ONLY)
            for name, role, rank in (
                ("scheduler", "scheduler", 0), ("server 0", "server", 0),
                ("worker 0", "worker", 0), ("worker 1", "worker", 1),
            )
        }  # fmt: skip
        eventually(lambda: len(list(tmp_path.glob("trains-*"))) == 2)
        killed = parts.pop("worker 1")
        killed.kill()
        ended = results(parts, time.monotonic(), DEADLINE_S)
        killed.communicate()
    place = rf"127.0.0.1, process {killed.pid}"
    for name, result in ended.items():
        said = rf"worker 1 \(round \d+\): its process ended without a word \({place}\)"
        assert result.code == 1 and re.search(said, result.output), f"{name}: {result.output}"
    print(f"all ended {max(result.seconds for result in ended.values()):.1f} s after it was killed")


def test_a_link_that_waited_for_many_bytes_tells_its_next_connection_of_few() -> None:
    """A handshake's last frame comes in two pieces, and its link goes elsewhere then."""
    listener = Tcp().listen("127.0.0.1")
    fars = [Tcp().connect(listener.address, 10.0) for _ in range(2)]
    nears: List[Link] = []
    while len(nears) < 2:
        nears += listener.accept(2)[0]
    over: List[Tuple[Link, bytes]] = []
    handler = Nobody()
    handler.arrivals = {Kind.HELLO: lambda connection, *_: over.append(connection.hand_over())}
    conversation = Conversation({Phase.NEW: {Kind.HELLO: Rule(1000)}}, "worker")
    known, attempt = (Connection(near, conversation, handler, 1 << 16) for near in nears)
    said = frame(Kind.HELLO, 0, bytes(1000))
    for piece in (said[:500], said[500:]):
        fars[1].send([memoryview(piece)])
        assert select.select([attempt.descriptor], [], [], 10.0)[0]
        attempt.receive()
    [(link, _)] = over
    known.take_over(link)
    fars[1].send([memoryview(b"!")])
    assert select.select([known.descriptor], [], [], 10.0)[0]
    for one in (listener, *fars, *nears):
        one.close()
