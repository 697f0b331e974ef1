"""Limits on links: those of a cluster hold whole packets, that of a device goes as it came."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cluster import Cluster, LinkGoodput, missing_requirements
from experiments.cluster.netns import measure_goodput, run_tool
from experiments.cluster.throttle import bucket
from tests.jobs import eventually
from tests.links import assert_reaches

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0

_PROBLEM = missing_requirements()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


@pytest.mark.parametrize("rate_mbit_s", [0.1, 1, 10, 100, 1000, 100000])
def test_a_bucket_holds_whole_packets_and_five_ms_at_most(rate_mbit_s):
    limit = bucket(rate_mbit_s)
    assert 1514 < limit.packet_bytes < limit.burst_bytes < limit.queue_bytes
    assert limit.burst_bytes <= max(16384, rate_mbit_s * 1e6 / 8 * 0.005)
    assert limit.burst_bytes <= 131072


@pytest.fixture
def place():
    """A host with an unlimited link, whose interface stands for a real one."""
    with Cluster(2) as cluster:
        yield cluster


def _limit(cluster, *arguments, device=None):
    host = cluster.hosts[0]
    return host.popen(
        [sys.executable, "-m", "scripts.cluster", "limit", device or host.interface, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _qdisc(cluster):
    host = cluster.hosts[0]
    return run_tool("tc", "-n", host.namespace, "qdisc", "show", "dev", host.interface)


def _set_qdisc(cluster, words):
    host = cluster.hosts[0]
    place = ["-n", host.namespace, "qdisc", "replace", "dev", host.interface, "root"]
    run_tool("tc", *place, *words.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_device_is_limited_until_a_signal(place, number):
    before = _qdisc(place)
    with _limit(place, "50") as limit:
        assert "50" in limit.stdout.readline()
        assert "rate 50Mbit" in _qdisc(place)
        limit.send_signal(number)
        limit.communicate(timeout=DEADLINE_S)
    eventually(lambda: _qdisc(place) == before)


@pytest.mark.parametrize("words", ["", "handle 9: tbf rate 70mbit burst 40k latency 20ms"])
def test_a_device_gets_back_the_qdisc_it_had(place, words):
    if words:
        _set_qdisc(place, words)
    before = _qdisc(place)
    command = ["tc", "qdisc", "show", "dev", place.hosts[0].interface]
    with _limit(place, "50", "--", *command) as limit:
        output, errors = limit.communicate(timeout=DEADLINE_S)
    assert (limit.returncode, errors) == (0, "")
    assert "rate 50Mbit" in output
    assert _qdisc(place) == before


@pytest.mark.alone
def test_a_limited_device_sends_at_the_rate(place):
    with _limit(place, "50") as limit:
        limit.stdout.readline()
        sender, receiver = place.hosts
        ends = (sender.namespace, receiver.namespace, receiver.address, 0.4)
        assert_reaches(lambda: [LinkGoodput("", "", measure_goodput(*ends), 50)], 50)
        limit.send_signal(signal.SIGINT)
        limit.communicate(timeout=DEADLINE_S)
    assert limit.returncode == 128 + signal.SIGINT


def test_a_limit_passes_on_how_its_command_ended(place):
    with _limit(place, "50", "--", "sh", "-c", "exit 9") as limit:
        limit.communicate(timeout=DEADLINE_S)
    assert limit.returncode == 9


@pytest.mark.parametrize(
    "words", ["htb default 10", "handle 7033: tbf rate 9mbit burst 9k limit 90k"]
)
def test_a_qdisc_that_could_not_be_put_back_is_left_alone(place, words):
    _set_qdisc(place, words)
    before = _qdisc(place)
    with _limit(place, "50", "--", "true") as limit:
        _, errors = limit.communicate(timeout=DEADLINE_S)
    assert limit.returncode == 1
    assert "remove it first with 'tc qdisc del dev" in errors
    assert _qdisc(place) == before


def test_a_device_that_does_not_exist_is_refused(place):
    with _limit(place, "50", device="nonesuch") as limit:
        _, errors = limit.communicate(timeout=DEADLINE_S)
    assert limit.returncode == 1
    assert "no interface 'nonesuch': there are lo, " in errors
