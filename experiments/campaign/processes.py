"""The processes of a job: what runs on which host, and what its environment tells it."""

from __future__ import annotations

import random
import secrets
from typing import Dict, List, NamedTuple, Sequence

from experiments.cluster import Host
from experiments.emulation.systems import System


class Process(NamedTuple):
    """One process of a job. Its role is "scheduler", "server", "worker" or "rendezvous"."""

    role: str
    host: Host
    command: List[str]
    environment: Dict[str, str]


def with_servers(
    hosts: Sequence[Host], system: System, working: Sequence[Host], worker: List[str]
) -> List[Process]:
    """A scheduler on the first host, a server on each, and a worker, which runs `worker`, on each
    of `working`.

    Ranks are in the order of the hosts.
    """
    common = {
        "DMLC_PS_ROOT_URI": hosts[0].address,
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NUM_WORKER": str(len(working)),
        "DMLC_NUM_SERVER": str(len(hosts)),
        "P3KV_SECRET": secrets.token_hex(32),
    }

    def process(role: str, rank: int, host: Host) -> Process:
        environment = {
            **common,
            "DMLC_ROLE": role,
            "DMLC_NODE_HOST": host.address,
            f"DMLC_{role.upper()}_ID": str(rank),
        }
        command = worker if role == "worker" else system.role_command
        return Process(role, host, command, environment)

    return [
        process("scheduler", 0, hosts[0]),
        *(process("server", rank, host) for rank, host in enumerate(hosts)),
        *(process("worker", rank, host) for rank, host in enumerate(working)),
    ]


def all_reducing(
    hosts: Sequence[Host], system: System, worker: List[str], port: int
) -> List[Process]:
    """Workers on all `hosts` that run `worker`, and where they find each other: on the first host,
    at `port`, on which a socket listens that the process gets as its input.

    They learn what Horovod's own launcher would tell them; each is alone on its host.
    """
    common = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0].address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_SIZE": str(len(hosts)),
    }
    names = [host.name for host in hosts]
    rendezvous = [system.python, "-m", "experiments.emulation.rendezvous", *names]
    made = [Process("rendezvous", hosts[0], rendezvous, {})]
    for host in hosts:
        environment = {
            **common,
            "HOROVOD_HOSTNAME": host.name,
            "HOROVOD_GLOO_IFACE": host.interface,
            "HOROVOD_RANK": str(host.index),
            "HOROVOD_CROSS_RANK": str(host.index),
        }
        made.append(Process("worker", host, worker, environment))
    return made


def process_group(hosts: Sequence[Host], worker: List[str]) -> List[Process]:
    """Workers on all `hosts` that run `worker`, and learn what torchrun would tell them; each is
    alone on its host."""
    common = {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(len(hosts)),
    }
    return [
        Process(
            "worker", host, worker,
            {**common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface},
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def _free_port() -> int:
    """A port that is free in a host's namespace, which nobody else uses, and stays so: below those
    that the kernel gives to who asks for any."""
    return random.randrange(10_000, 32_768)
