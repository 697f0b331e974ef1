"""Hosts have names and addresses of both families; jobs run where there is only IPv6."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator

import pytest

from experiments.cluster import Cluster, missing_requirements
from experiments.cluster.netns import in_namespace
from p3kv.common import addresses
from p3kv.config import Launch
from p3kv.errors import ConfigError
from p3kv.processes.launcher.parts import Host, parse_hosts
from p3kv.wire.address import listening_address, own_address, scheduler_address
from tests import sshd
from tests.jobs import JOIN, SECRET, environment, held_port, results, start_on
from tests.names import give_names
from tests.on_cluster import HOLD, ClusterJob, needs
from tests.whole_jobs.test_exactness import Trained, assert_summed_in_rank_order, exact_model

DEADLINE_S = 60.0
PLACE = {
    "DMLC_ROLE": "worker", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1", "P3KV_SECRET": SECRET,
}  # fmt: skip
needs_hosts = needs(missing_requirements())


@pytest.fixture(scope="module")
def ipv6_only() -> Iterator[Cluster]:
    """Two hosts with IPv6 addresses only, that know each other as n0 and n1."""
    with Cluster(2, ipv6=True) as made:
        give_names(made, ["n0", "n1"])
        yield made


def _launch(root: str, **changes: str) -> Launch:
    launch = Launch.from_environment({**PLACE, "DMLC_PS_ROOT_URI": root, **changes})
    assert launch is not None
    return launch


@pytest.mark.parametrize(
    ("host", "written"), [("n0", "n0:9"), ("127.0.0.1", "127.0.0.1:9"), ("fd00::1", "[fd00::1]:9")]
)
def test_a_port_follows_an_address_without_ambiguity(host: str, written: str) -> None:
    assert addresses.endpoint(host, 9) == written


@pytest.mark.parametrize("written", ["::1", "[::1]"])
def test_an_ipv6_scheduler_may_be_written_with_brackets_or_without(written: str) -> None:
    launch = _launch(written, P3KV_SECRET="")
    assert launch.root_host == "::1"
    assert scheduler_address(launch) == "[::1]:9000"
    assert (own_address(launch), listening_address(launch)) == ("::1", "::1")
    assert launch.job == "[::1]:9000/2w1s"


def test_hosts_of_ssh_may_be_ipv6_addresses_in_brackets() -> None:
    assert parse_hosts("[fd00::1],me@[fd00::2]:3,n1:2") == [
        Host("fd00::1", 1), Host("me@fd00::2", 3), Host("n1", 2)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"comes twice; write \[fd00::1\]:2"):
        parse_hosts("[fd00::1],[fd00::1]:2")
    with pytest.raises(ConfigError, match="IPv6 addresses in brackets"):
        parse_hosts("fd00::1")


@needs_hosts
def test_addresses_of_hosts_that_have_only_ipv6(ipv6_only: Cluster) -> None:
    first, second = ipv6_only.hosts
    script = (
        "from p3kv.common import addresses\n"
        "from p3kv.processes.launcher.parts import Host, address_of_first\n"
        f"print(addresses.addresses('n1'), addresses.route('n1'), "
        f"addresses.of_interface('{first.interface}'))\n"
        "print(address_of_first([Host('own-name', 1), Host('n1', 1)]))"
    )
    process = first.popen(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    )
    expected = f"{[second.address]} {(second.address, first.address)} {first.address}"
    assert process.communicate(timeout=DEADLINE_S)[0].splitlines() == [expected, first.address]
    with pytest.raises(OSError):
        in_namespace(first.namespace, lambda: addresses.of_interface("lo6"))


@needs_hosts
@pytest.mark.parametrize("encrypt", [0, 1])
def test_a_job_trains_where_there_is_only_ipv6(
    ipv6_only: Cluster, encrypt: int, tmp_path: Path
) -> None:
    settings = {"P3KV_SLICE_SIZE": exact_model.SLICE_SIZE, "P3KV_ENCRYPT": encrypt}
    for role, process in start_on(ipv6_only, "exact.py", [tmp_path, "sgd-servers"], **settings):
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, f"{role}: {said}"
    assert_summed_in_rank_order(Trained(2, tmp_path), "sgd-servers")


def test_ranks_find_each_other_at_an_ipv6_address_of_their_own_host() -> None:
    with held_port("::1") as holder:
        place = {
            "WORLD_SIZE": 2, "MASTER_ADDR": "::1", "DMLC_PS_ROOT_PORT": holder.getsockname()[1],
            "P3KV_SECRET": "",
        }  # fmt: skip
        since = time.monotonic()
        workers = {
            f"worker {rank}": subprocess.Popen(
                JOIN,
                env=environment(**place, RANK=rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
            for rank in range(2)
        }
        for name, result in results(workers, since, DEADLINE_S).items():
            assert result.code == 0, f"{name}: {result.output}"


@needs(missing_requirements(), sshd.missing())
@pytest.mark.parametrize("hosts", ["n0,n1", "[fd77::1],[fd77::2]"])
def test_ssh_starts_a_job_where_there_is_only_ipv6(
    ipv6_only: Cluster, hosts: str, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder, sshd.ssh_between(ipv6_only, Path(folder)) as path:
        command = [sys.executable, "-m", "p3kv", "launch", "-H", hosts, "--"]
        job = ClusterJob(ipv6_only, tmp_path, [*command, *HOLD, str(tmp_path)], PATH=path)
        job.wait_until_joined()
        job.stop()
        assert job.result().code == 0
