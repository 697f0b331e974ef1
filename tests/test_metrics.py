"""Workers and servers serve their numbers in Prometheus's format, if they are asked to."""

from __future__ import annotations

import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Dict, Tuple

import pytest
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


def test_several_processes_of_a_host_take_the_next_ports() -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        holder.listen()
        first = Metrics(Settings(metrics_port=port), "server", 0, lambda: ServerNumbers(rounds=3))
        second = Metrics(Settings(metrics_port=port), "worker", 1, WorkerNumbers)
    try:
        ports = [first._server.server_address[1], second._server.server_address[1]]
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
    assert none._server is None
    none.close()
    with pytest.raises(ConfigError, match="P3KV_METRICS_HOST must be an address of this host"):
        Metrics(Settings(metrics_port=0, metrics_host="192.0.2.1"), "worker", 0, WorkerNumbers)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'p3kv\[metrics\]'"):
        Metrics(Settings(metrics_port=0), "worker", 0, WorkerNumbers)
