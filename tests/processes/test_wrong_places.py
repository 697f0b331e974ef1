"""Processes without a place in a job, and those that wait for others in vain, are told so."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any, Dict, Iterator, List

import pytest
import zmq

from p3kv.config import Launch
from p3kv.errors import ConfigError
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    PROMISED_S,
    SCRIPTS,
    JobResult,
    end,
    environment,
    held_port,
    output_of,
    results,
    start_role,
)

TIMEOUT_S = 6.0
"""Of the rendezvous: long enough for a first word on who is missing, short for a test."""
WEB_ANSWER = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + b"<html>Bad</html>\n" * 40
PLACE = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"DMLC_ROLE": "boss"}, ["DMLC_ROLE is 'boss'", "scheduler, server, worker"]),
        ({"DMLC_PS_ROOT_URI": None}, ["DMLC_PS_ROOT_URI is not set", "p3kv launch"]),
        ({"DMLC_PS_ROOT_PORT": None}, ["DMLC_PS_ROOT_PORT is not set", "p3kv launch"]),
        ({"DMLC_NUM_WORKER": None}, ["DMLC_NUM_WORKER is not set", "p3kv launch"]),
        ({"DMLC_NUM_SERVER": ""}, ["DMLC_NUM_SERVER is not set", "p3kv launch"]),
        ({"DMLC_PS_ROOT_PORT": "70000"}, ["DMLC_PS_ROOT_PORT is '70000'", "from 1 to 65535"]),
        ({"DMLC_NUM_WORKER": "two"}, ["DMLC_NUM_WORKER is 'two'", "a number from 1"]),
        ({"DMLC_NUM_SERVER": "0"}, ["DMLC_NUM_SERVER is '0'", "a number from 1"]),
        ({"DMLC_WORKER_ID": "first"}, ["DMLC_WORKER_ID is 'first'", "a whole number"]),
    ],
)
def test_a_wrong_place_in_the_job_is_named_with_the_remedy(
    changes: Dict[str, Any], words: List[str]
) -> None:
    environ = {k: v for k, v in {**PLACE, **changes}.items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        Launch.from_environment(environ)
    assert all(word in str(caught.value) for word in words), caught.value


# Processes that learn at once.


@pytest.fixture(scope="module")
def at_once() -> Dict[str, JobResult]:
    """Processes that are told as soon as they have started, all at the same time."""
    code = [sys.executable, "-c", "import p3kv; print('imported')"]
    late = [
        sys.executable,
        "-c",
        "import os; role = os.environ.pop('DMLC_ROLE'); import mxnet\n"
        "os.environ['DMLC_ROLE'] = role; import p3kv",
    ]
    start = time.monotonic()
    with held_port() as port, socket.create_server(("127.0.0.1", 0)) as taken:
        free_port, taken_port = port.getsockname()[1], taken.getsockname()[1]
        processes = {
            "wrong role": start_role("boss", code, free_port),
            "missing variable": start_role("server", code, free_port, DMLC_NUM_SERVER=""),
            "wrong setting": start_role("server", code, free_port, P3KV_SLICE_SIZE="abc"),
            "wrong setting in a worker": start_role(
                "worker", code, free_port, P3KV_SLICE_SIZE="abc"
            ),
            "wrong interface": start_role("worker", code, free_port, DMLC_INTERFACE="p3kv9"),
            "address of another host": start_role(
                "server", code, free_port, DMLC_NODE_HOST="203.0.113.1"
            ),
            "unknown host": start_role("worker", code, free_port, root="no-such-host.invalid"),
            "port in use": start_role("scheduler", code, taken_port),
            "mxnet first in a server": start_role("server", late, free_port),
            "mxnet first in a scheduler": start_role("scheduler", late, free_port),
        }
        return results(processes, start, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrong role", ["p3kv: DMLC_ROLE is 'boss'", "scheduler, server, worker"]),
        ("missing variable", ["p3kv: DMLC_NUM_SERVER is not set", "p3kv launch"]),
        ("wrong setting", ["p3kv server: slice_size (P3KV_SLICE_SIZE) is 'abc'", "number"]),
        ("wrong setting in a worker", ["p3kv worker: slice_size (P3KV_SLICE_SIZE) is 'abc'"]),
        ("wrong interface", ["DMLC_INTERFACE is 'p3kv9'", "This host has", "lo"]),
        ("address of another host", ["can't listen at 203.0.113.1", "DMLC_NODE_HOST"]),
        ("unknown host", ["no-such-host.invalid", "DMLC_PS_ROOT_URI"]),
        ("port in use", ["port is in use: 127.0.0.1:", "DMLC_PS_ROOT_PORT", "p3kv launch"]),
        (
            "mxnet first in a server",
            ["mxnet was imported before p3kv", "first import", "p3kv run"],
        ),
        ("mxnet first in a scheduler", ["mxnet was imported before p3kv", "first import"]),
    ],
)
def test_a_process_that_can_not_take_its_place_says_why_and_fails(
    at_once: Dict[str, JobResult], case: str, words: List[str]
) -> None:
    said = at_once[case].output
    assert all(word in said for word in words), said
    assert "Traceback" not in said
    assert at_once[case].code == 1


# Processes that wait for others in vain.


class ForeignServer:
    """A TCP server that is not p3kv's: it sends everybody the same bytes, and reads nothing."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: List[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> int:
        self._thread.start()
        port: int = self._listener.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        # Closing alone would not wake the thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5.0)
        for sock in (self._listener, *self._peers):
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                peer = self._listener.accept()[0]
            except OSError:
                return
            self._peers.append(peer)
            with suppress(OSError):  # it has hung up
                peer.sendall(self._answer)


@pytest.fixture(scope="module")
def in_vain() -> Iterator[Dict[str, JobResult]]:
    """Jobs that can't come together, all at the same time, since they mostly wait."""
    with ExitStack() as stack:

        def port() -> int:
            number: int = stack.enter_context(held_port()).getsockname()[1]
            return number

        too_few_workers, too_few_servers, empty = port(), port(), port()
        silent, ssh, web = (
            stack.enter_context(ForeignServer(answer))
            for answer in (b"", b"SSH-2.0-OpenSSH_9.6\r\n", WEB_ANSWER)
        )
        router = stack.enter_context(zmq.Context()).socket(zmq.ROUTER)
        mute = router.bind_to_random_port("tcp://127.0.0.1")
        start = time.monotonic()

        def begin(role: str, at: int, **changes: Any) -> subprocess.Popen:
            return start_role(role, JOIN, at, P3KV_RENDEZVOUS_TIMEOUT_S=TIMEOUT_S, **changes)

        processes = {
            "too few workers: scheduler": begin("scheduler", too_few_workers, workers=3),
            "too few workers: server": begin("server", too_few_workers, workers=3),
            "too few workers: worker": begin(
                "worker", too_few_workers, workers=3, DMLC_WORKER_ID=1
            ),
            "too few servers: scheduler": begin("scheduler", too_few_servers, servers=2),
            "too few servers: server": begin("server", too_few_servers, servers=2),
            "too few servers: worker": begin("worker", too_few_servers, servers=2),
            "no scheduler: server": begin("server", empty),
            "no scheduler: worker": begin("worker", empty),
            "a silent server: worker": begin("worker", silent),
            "an SSH server: worker": begin("worker", ssh),
            "a web server: worker": begin("worker", web),
            "a web server: server": begin("server", web),
            "a mute ZeroMQ server: worker": begin("worker", mute),
        }
        try:
            yield results(processes, start, timeout_s=DEADLINE_S)
        finally:
            router.close()


OTHER_PORT = ["at 127.0.0.1:", "Another program holds the port", "DMLC_PS_ROOT_PORT", "p3kv launch"]
IN_VAIN = {
    "too few workers": [
        "1 of 3 workers arrived (worker 0, 2 missing)", "1 of 1 server arrived",
        "DMLC_NUM_WORKER", "P3KV_RENDEZVOUS_TIMEOUT_S",
    ],
    "too few servers": [
        "1 of 1 worker arrived", "1 of 2 servers arrived", "DMLC_NUM_SERVER", "output of those",
    ],
    "no scheduler": [
        "no p3kv scheduler answered at 127.0.0.1:", "nothing listens there",
        "DMLC_PS_ROOT_URI", "Start the scheduler", "'import p3kv' must be its first import",
    ],
    "a silent server": ["no p3kv scheduler answered", *OTHER_PORT],
    "an SSH server": ["is no p3kv scheduler", *OTHER_PORT],
    "a web server": ["is no p3kv scheduler", *OTHER_PORT],
    "a mute ZeroMQ server": [
        "does not answer as a p3kv scheduler does", "the same p3kv everywhere",
        "'import p3kv' must be its first import",
    ],
}  # fmt: skip


@pytest.mark.parametrize("reason", IN_VAIN)
def test_whoever_waits_in_vain_ends_and_says_for_whom(
    in_vain: Dict[str, JobResult], reason: str
) -> None:
    waiting = {case: result for case, result in in_vain.items() if case.startswith(reason)}
    assert waiting
    for case, result in waiting.items():
        for word in IN_VAIN[reason]:
            assert word in result.output, f"{case}: {result.output}"
        assert result.code == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "too few workers: scheduler",
            ["waiting for worker 0, worker 2; 1 of 3 workers and 1 of 1 server have come "
             "(127.0.0.1: worker 1, server", "once its script does 'import p3kv'",
             "start the script as 'p3kv run train.py'"],
        ),
        ("too few servers: scheduler", ["waiting for 1 server; 1 of 1 worker and 1 of 2 "]),
        ("no scheduler: server", ["waiting for a p3kv scheduler at 127.0.0.1:", "nothing listens"]),
        ("a silent server: worker", ["waiting for a p3kv", "says nothing that a scheduler says"]),
    ],
)  # fmt: skip
def test_whoever_waits_says_for_whom_before_it_gives_up(
    in_vain: Dict[str, JobResult], case: str, words: List[str]
) -> None:
    said = in_vain[case].output
    for word in words:
        assert word in said, said
    assert said.count("waiting for") - said.count("still waiting for") == 1


@pytest.mark.alone
def test_native_processes_that_an_early_import_of_mxnet_starts_are_recognised_by_the_worker() -> (
    None
):
    command = [sys.executable, str(SCRIPTS / "mxnet_first.py")]
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import mxnet"], check=True, env=environment())
    # Three processes import it now.
    promised_s = max(PROMISED_S, 5 * (time.monotonic() - start))
    with held_port() as port:
        number = port.getsockname()[1]
        start = time.monotonic()
        native = [start_role(role, command, number) for role in ("scheduler", "server")]
        worker = start_role("worker", command, number)
        try:
            said = output_of(worker, promised_s)
            took_s = time.monotonic() - start
        finally:
            for process in (worker, *native):
                end(process)
                process.communicate()
    print(f"told after {took_s:.1f} s")
    assert said is not None, f"the worker was told nothing within {promised_s:g} s"
    for word in ("'import p3kv' must be its first import", "p3kv run"):
        assert word in said
    assert "Traceback" not in said
    assert worker.returncode == 1
