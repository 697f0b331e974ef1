"""Workers and servers serve their numbers in Prometheus's format, if they are asked to."""

from __future__ import annotations

import re
import socket
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Dict, Tuple, Union
from urllib.parse import urlsplit

import pytest
from msgspec.structs import astuple
from prometheus_client.parser import text_string_to_metric_families

from p3kv.config import Settings
from p3kv.errors import ConfigError
from p3kv.report.metrics import Metrics
from p3kv.wire.messages import ServerNumbers, WorkerNumbers
from tests.jobs import DEADLINE_S, SUMS_ONLY, TrainingJob, eventually, held_port

_AT = re.compile(r"p3kv (\w+ \d) [\d:.]+: metrics for Prometheus are at (http://\S+)")


def scraped(url: str) -> Dict[Tuple[str, ...], float]:
    """By a sample's name and the values of its labels."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (one.name, *one.labels.values()): one.value
            for family in families
            for one in family.samples
        }


def test_each_process_of_a_job_serves_its_own(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, P3KV_METRICS_PORT=0, **SUMS_ONLY) as job:
        job.wait_until_training()
        at = dict(_AT.findall(job.output()))
        assert set(at) == {"worker 0", "worker 1", "server 0"}, job.output()
        eventually(lambda: scraped(at["worker 1"])["p3kv_worker_steps_total", "1"] > 2)
        found = scraped(at["worker 1"])
        assert found["p3kv_worker_step_seconds_total", "1"] > 0
        assert found["p3kv_worker_bytes_sent_total", "1"] > 0
        assert ("p3kv_worker_push_bytes_per_second", "1") in found
        server = scraped(at["server 0"])
        last = [server["p3kv_server_last_rounds_total", "0", str(rank)] for rank in range(2)]
        assert sum(last) == pytest.approx(server["p3kv_server_rounds_total", "0"], abs=1)
        assert sum(last) > 0
        job.stop()
        assert job.result(DEADLINE_S).code == 0, job.output()
    with pytest.raises(urllib.error.URLError):
        scraped(at["worker 1"])


@pytest.mark.parametrize("numbers", [WorkerNumbers(), ServerNumbers()])
def test_each_metric_says_what_it_is(numbers: Union[WorkerNumbers, ServerNumbers]) -> None:
    metrics = Metrics(Settings(), "process", 0, lambda: numbers)
    said = {family.name: family.documentation for family in metrics.collect()}
    assert len(said) == len([one for one in astuple(numbers) if not isinstance(one, str)])
    assert all(len(words.split()) > 2 for words in said.values()), said
    assert len(set(said.values())) == len(said)


def closed_within(link: socket.socket, timeout_s: float) -> bool:
    link.settimeout(timeout_s)
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def test_whoever_asks_in_vain_takes_no_descriptors_or_threads_from_the_job(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, P3KV_METRICS_PORT=0, **SUMS_ONLY) as job, ExitStack() as stack:
        job.wait_until_training()
        at = dict(_AT.findall(job.output()))
        parts = {name: part for name, part in job.parts().items() if name in at}
        before = {name: (part.num_fds(), part.num_threads()) for name, part in parts.items()}
        half_sent = []
        for url in at.values():
            place = urlsplit(url)
            for _ in range(200):
                link = socket.create_connection((place.hostname, place.port), timeout=10)
                half_sent.append(stack.enter_context(link))
                link.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
            # Others are answered meanwhile.
            assert scraped(url)
        for name, part in parts.items():
            fds, threads = before[name]
            # 32 that are open, and those of some turns that are just being closed.
            assert part.num_fds() <= fds + 100, name
            assert part.num_threads() <= threads + 1, name
        for link in half_sent:
            assert closed_within(link, 10.0)
        for name, part in parts.items():
            eventually(lambda: part.num_fds() <= before[name][0] + 1)  # noqa: B023
        job.stop()
        assert job.result(30.0).code == 0, job.output()


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics?debug HTTP/1.1\r\nAccept: */*\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01 what is this?\r\n\r\n", b""),
        (b"GET /" + b"x" * 100_000, b""),
        (b"GET //[ HTTP/1.1\r\n\r\n", b""),
        (b"\xff\xff\r\n\r\n", b""),
    ],
)
def test_requests_are_answered_in_their_language_or_not_at_all(asked: bytes, status: bytes) -> None:
    metrics = Metrics(Settings(metrics_port=0), "server", 0, lambda: ServerNumbers(rounds=3))
    assert metrics._serving is not None
    try:
        with socket.create_connection(metrics._serving.address[:2], timeout=10) as link:
            answer = b""
            with suppress(ConnectionResetError, BrokenPipeError):
                link.sendall(asked)
                while more := link.recv(4096):
                    answer += more
        assert answer.partition(b"\r\n")[0].split()[1:2] == ([status] if status else [])
        assert (b"p3kv_server_rounds_total" in answer) == (status == b"200")
    finally:
        metrics.close()


def test_several_processes_of_a_host_take_the_next_ports() -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        holder.listen()
        first = Metrics(Settings(metrics_port=port), "server", 0, lambda: ServerNumbers(rounds=3))
        second = Metrics(Settings(metrics_port=port), "worker", 1, WorkerNumbers)
    try:
        ports = [first._serving.address[1], second._serving.address[1]]
        assert port < ports[0] < ports[1] <= port + 64
        assert scraped(f"http://127.0.0.1:{ports[0]}/metrics")["p3kv_server_rounds_total", "0"] == 3
    finally:
        first.close()
        second.close()
        second.close()
    with socket.socket() as again:
        again.bind(("127.0.0.1", ports[1]))


def test_nothing_is_served_unless_asked_for_and_errors_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = Metrics(Settings(), "worker", 0, WorkerNumbers)
    assert none._serving is None
    none.close()
    with pytest.raises(ConfigError, match="P3KV_METRICS_HOST must be an address of this host"):
        Metrics(Settings(metrics_port=0, metrics_host="192.0.2.1"), "worker", 0, WorkerNumbers)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'p3kv\[metrics\]'"):
        Metrics(Settings(metrics_port=0), "worker", 0, WorkerNumbers)
