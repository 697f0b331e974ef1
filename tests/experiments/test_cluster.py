"""The throttled cluster: its links are as fast as they say, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.cluster import Cluster, ClusterError, LinkGoodput, missing_requirements
from experiments.cluster.netns import CleanupGuard, in_namespace, measure_goodput, run_tool
from scripts.cluster import main
from tests.jobs import eventually
from tests.links import assert_reaches

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0

_PROBLEM = missing_requirements()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


def _namespaces(name):
    return [line for line in run_tool("ip", "netns", "list").splitlines() if name in line]


def _files(name):
    return list(Path("/etc/netns").glob(f"{name}*"))


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _python(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_names_are_unique_and_short_enough_for_interfaces():
    clusters = [Cluster(2) for _ in range(20)]
    names = [host.namespace for cluster in clusters for host in cluster.hosts]
    assert len(set(names)) == len(names)
    assert all(len(host.interface) <= 15 for cluster in clusters for host in cluster.hosts)


@pytest.mark.parametrize("host_count", [0, 1001])
def test_an_impossible_number_of_hosts_is_refused(host_count):
    with pytest.raises(ClusterError, match="1 to 1000"):
        Cluster(host_count)


@pytest.mark.parametrize("rate_mbit_s", [0, -1, 0.01, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused_and_leaves_nothing(rate_mbit_s):
    cluster = Cluster(2, rate_mbit_s)
    with pytest.raises(ClusterError, match="Mbit/s"):
        cluster.__enter__()
    assert _namespaces(cluster.name) == []


@pytest.mark.alone
def test_each_link_carries_its_rate_both_ways():
    with Cluster(3, 200) as cluster:
        links = cluster.goodput(0.1)
        assert [(link.sender, link.receiver) for link in links] == [
            ("host0", "host1"),
            ("host1", "host2"),
            ("host2", "host0"),
        ]
        assert_reaches(lambda: cluster.goodput(0.5), 200)
        assert_reaches(lambda: cluster.goodput(0.5, at_once=True), 200)


def test_a_short_flow_after_a_pause_does_not_exceed_the_rate():
    with Cluster(2, 100) as cluster:
        sender, receiver = cluster.hosts
        listener = in_namespace(
            receiver.namespace, lambda: socket.create_server((receiver.address, 0))
        )
        source = in_namespace(sender.namespace, socket.socket)
        with listener, source:
            for end in (listener, source):
                end.settimeout(DEADLINE_S)
            source.connect(listener.getsockname())
            sink = listener.accept()[0]
            with sink, ThreadPoolExecutor(1) as pool:
                sink.settimeout(DEADLINE_S)
                begin = time.monotonic()
                sending = pool.submit(source.sendall, bytes(250_000))
                left_bytes = 250_000
                while left_bytes:
                    left_bytes -= len(sink.recv(65536))
                elapsed_s = time.monotonic() - begin
                sending.result()
    # 20 ms at the rate; the burst is worth 5 ms.
    assert elapsed_s >= 0.0145


@pytest.mark.alone
def test_the_rate_changes_under_a_living_connection():
    with Cluster(2, 50) as cluster, ThreadPoolExecutor(1) as pool:
        sender, receiver = cluster.hosts

        def received_mbit_s(seconds):
            begin, before = time.monotonic(), cluster.interface_counters(receiver)[0]
            time.sleep(seconds)
            count_bytes = cluster.interface_counters(receiver)[0] - before
            return count_bytes * 8e-6 / (time.monotonic() - begin)

        flow = pool.submit(
            measure_goodput, sender.namespace, receiver.namespace, receiver.address, 2.0
        )
        eventually(lambda: received_mbit_s(0.2) > 30)
        assert received_mbit_s(0.5) < 55
        cluster.set_rate(100)
        eventually(lambda: received_mbit_s(0.2) > 70)
        assert received_mbit_s(0.5) < 110
        flow.result()


@pytest.mark.alone
def test_a_much_lower_rate_does_not_stall_what_was_queued():
    with Cluster(2, 1000) as cluster, ThreadPoolExecutor(1) as pool:
        sender, receiver = cluster.hosts
        flow = pool.submit(
            measure_goodput, sender.namespace, receiver.namespace, receiver.address, 1.5
        )
        time.sleep(0.5)
        cluster.set_rate(20)
        time.sleep(0.5)
        before = cluster.interface_counters(receiver)[0]
        time.sleep(0.5)
        assert 0 < cluster.interface_counters(receiver)[0] - before < 1.3 * 0.5 * 20e6 / 8
        flow.result()


@pytest.mark.alone
@pytest.mark.long
def test_one_host_can_be_slower_and_limits_can_go():
    with Cluster(2, 50) as cluster:
        cluster.set_rate(20, cluster.hosts[1])
        assert [link.limit_mbit_s for link in cluster.goodput(0.1)] == [20, 20]
        # Loss at the slower port makes the payload come in lumps.
        assert_reaches(lambda: cluster.goodput(0.6), 20, excess=1.2)
        cluster.set_rate(None)
        assert min(link.mbit_s for link in cluster.goodput(0.2)) > 300
        cluster.set_rate(None)


def test_a_lossy_link_loses_its_share_of_the_packets():
    with Cluster(2) as cluster, contextlib.ExitStack() as stack:
        sender, receiver = (
            stack.enter_context(
                in_namespace(host.namespace, lambda: socket.socket(type=socket.SOCK_DGRAM))
            )
            for host in cluster.hosts
        )
        receiver.bind((cluster.hosts[1].address, 0))
        receiver.settimeout(0.2)

        def arrived():
            count = 0
            for _ in range(150):
                sender.sendto(b"packet", receiver.getsockname())
            with contextlib.suppress(TimeoutError, socket.timeout):
                while receiver.recv(10):
                    count += 1
            return count

        assert arrived() == 150
        with cluster.lossy(cluster.hosts[1], 0.3):
            assert 70 < arrived() < 140
        assert arrived() == 150


def test_counters_follow_what_a_host_sends_and_receives():
    with Cluster(2, 100) as cluster:
        before = [cluster.interface_counters(host) for host in cluster.hosts]
        begin = time.monotonic()
        links = cluster.goodput(0.3)
        elapsed_s = time.monotonic() - begin
        after = [cluster.interface_counters(host) for host in cluster.hosts]
    payload_bytes = min(link.mbit_s for link in links) * 1e6 / 8 * 0.3
    for old, new in zip(before, after):
        for count_bytes in (new[0] - old[0], new[1] - old[1]):
            assert payload_bytes <= count_bytes <= elapsed_s * 100e6 / 8
    with pytest.raises(ClusterError, match="not there"):
        cluster.interface_counters(cluster.hosts[0])


@pytest.mark.parametrize("algorithm", ["cubic", "reno"])
def test_hosts_use_the_congestion_control_asked_for_and_the_machine_keeps_its_own(algorithm):
    settings = [
        Path(f"/proc/sys/net/ipv4/tcp_{name}_congestion_control").read_text()
        for name in ("allowed", "available")
    ]
    with Cluster(2, congestion_control=algorithm) as cluster:
        for host in cluster.hosts:
            with in_namespace(host.namespace, socket.socket) as one:
                name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert name.rstrip(b"\0").decode() == algorithm
    assert settings == [
        Path(f"/proc/sys/net/ipv4/tcp_{name}_congestion_control").read_text()
        for name in ("allowed", "available")
    ]


def test_an_unknown_congestion_control_leaves_no_half_made_cluster():
    cluster = Cluster(2, congestion_control="nonesuch")
    with pytest.raises(ClusterError, match=r"nonesuch.*this kernel has .*modprobe"):
        cluster.__enter__()
    assert _namespaces(cluster.name) == []


@pytest.mark.alone
def test_two_clusters_with_the_same_addresses_do_not_meet():
    with Cluster(2, 20) as slow, Cluster(2, 40) as fast:
        assert slow.hosts[0].address == fast.hosts[0].address
        assert_reaches(lambda: slow.goodput(0.4), 20)
        assert_reaches(lambda: fast.goodput(0.4), 40)
    assert _namespaces(slow.name) == _namespaces(fast.name) == []


def test_a_cluster_uses_nothing_of_the_first_namespace():
    links = run_tool("ip", "-o", "link")
    with Cluster(3, 100) as cluster:
        assert len(_namespaces(cluster.name)) == 4
        now = run_tool("ip", "-o", "link")
    strip = re.compile(r"^(\d+: \S+)", re.MULTILINE)
    assert strip.findall(now) == strip.findall(links)


@pytest.mark.alone
def test_sixteen_hosts_come_up_quickly():
    took_s = {}
    for count in (4, 16):
        begin = time.monotonic()
        with Cluster(count, 100) as cluster:
            took_s[count] = time.monotonic() - begin
            assert len({host.address for host in cluster.hosts}) == count
        assert _namespaces(cluster.name) == []
    assert took_s[16] < max(5, 8 * took_s[4]), took_s


def test_each_host_means_itself_by_the_machines_name():
    resolve = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    with Cluster(2) as cluster:
        for host in cluster.hosts:
            process = host.popen([sys.executable, "-c", resolve], stdout=subprocess.PIPE, text=True)
            assert process.communicate(timeout=DEADLINE_S)[0].strip() == host.address


def test_processes_run_inside_their_host_and_end_with_the_cluster():
    with Cluster(2) as cluster:
        host = cluster.hosts[1]
        show = host.popen(
            [sys.executable, "-c", "import os; print(os.environ['A'], os.getpid(), os.getsid(0))"],
            env={"A": "b"},
            stdout=subprocess.PIPE,
            text=True,
        )
        pid = str(show.pid)
        assert show.communicate(timeout=DEADLINE_S)[0].split() == ["b", pid, pid]
        address = host.popen(["ip", "-o", "addr"], stdout=subprocess.PIPE, text=True)
        assert host.address in address.communicate(timeout=DEADLINE_S)[0]
        # One that obeys, one that has a child, one whose child left its process group.
        obedient = host.popen(["sleep", "1000"], start_new_session=False)
        parent = host.popen(
            ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
        escaped = host.popen(
            ["sh", "-c", "setsid sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
        children = [int(one.stdout.readline()) for one in (parent, escaped)]
    assert [one.returncode for one in (obedient, parent, escaped)] == [-signal.SIGTERM] * 3
    assert not any(_is_alive(child) for child in children)
    assert _namespaces(cluster.name) == []
    for one in (parent, escaped):
        one.stdout.close()


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr("experiments.cluster.cluster._END_TIMEOUT_S", 0.3)
    with Cluster(1) as cluster:
        stubborn = cluster.hosts[0].popen(
            ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"], stdout=subprocess.PIPE
        )
        stubborn.stdout.readline()
    assert stubborn.returncode == -signal.SIGKILL
    stubborn.stdout.close()


def test_an_exception_removes_the_cluster_and_passes_through():
    with pytest.raises(ZeroDivisionError), Cluster(2, 10) as cluster:
        raise ZeroDivisionError
    assert _namespaces(cluster.name) == [] == _files(cluster.name)
    cluster.close()


_HOLDER = """
import sys, time
from experiments.cluster import Cluster
with Cluster(2, 100) as cluster:
    child = cluster.hosts[0].popen(["sleep", "1000"])
    print(cluster.name, child.pid, flush=True)
    while True:
        time.sleep(0.1)  # a signal just before a wait without end would not end it
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_holder_removes_cluster_and_processes(number):
    with _python("-c", _HOLDER) as holder:
        name, child = holder.stdout.readline().split()
        assert len(_namespaces(name)) == 3
        assert len(_files(name)) == 2
        holder.send_signal(number)
        holder.communicate(timeout=DEADLINE_S)
    assert holder.returncode != 0
    eventually(lambda: not _namespaces(name) and not _files(name) and not _is_alive(int(child)))


_INTERRUPTED = """
import os, signal, sys
from experiments.cluster import cluster as module
switch_commands = module.Cluster._switch_commands
def kill_in_the_middle(self):
    print(self.name, flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
    return switch_commands(self)
module.Cluster._switch_commands = kill_in_the_middle
module.Cluster(2, 100).__enter__()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_half_made_cluster_is_removed(number):
    with _python("-c", _INTERRUPTED, str(int(number))) as holder:
        output, _ = holder.communicate(timeout=DEADLINE_S)
    assert holder.returncode != 0
    eventually(lambda: not _namespaces(output.strip()) and not _files(output.strip()))


def test_a_guard_waits_for_whoever_still_makes_something(tmp_path):
    mark = tmp_path / "mark"
    guard = CleanupGuard(f'touch "{mark}"')
    slow_tool = subprocess.Popen(["sleep", "1000"], pass_fds=(guard.fileno(),))
    guard._process.stdin.close()  # what the end of this process would do
    with pytest.raises(subprocess.TimeoutExpired):
        guard._process.wait(0.3)
    assert not mark.exists()
    slow_tool.kill()
    slow_tool.wait(DEADLINE_S)
    assert guard._process.wait(DEADLINE_S) == 0
    assert mark.exists()
    guard._process.stderr.close()


def test_a_failing_clean_up_is_reported():
    guard = CleanupGuard("echo what went wrong >&2; exit 3")
    with pytest.raises(ClusterError, match="what went wrong"):
        guard.release()
    guard.release()


def test_the_command_line_runs_a_command_on_every_host(capfd):
    script = 'echo "$P3_HOST_INDEX of $P3_HOST_ADDRESSES"'
    assert main(["run", "--hosts=2", "--rate=100", "--seconds=0.2", "--", "sh", "-c", script]) == 0
    output = capfd.readouterr().out
    assert "host0 -> host1" in output
    assert "0 of 10.77.0.1,10.77.0.2" in output
    assert "1 of 10.77.0.1,10.77.0.2" in output


def test_the_first_host_that_fails_ends_the_others(capfd):
    script = '[ "$P3_HOST_INDEX" = 0 ] && exit 7; sleep 1000'
    begin = time.monotonic()
    assert main(["run", "--hosts=2", "--seconds=0.1", "--", "sh", "-c", script]) == 7
    assert time.monotonic() - begin < DEADLINE_S


def test_an_unlimited_link_expects_nothing():
    assert LinkGoodput("a", "b", 1.0, None).expected_mbit_s is None
