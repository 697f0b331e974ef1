"""The processes of a job: what runs on which host, and what its environment tells it."""

from __future__ import annotations

import random
import secrets
from typing import Dict, List, NamedTuple, Sequence

from experiments.cluster import Host
from experiments.emulation.systems import System


class Process(NamedTuple):
    """One process of a job. Its role is "scheduler", "server" or "worker"."""

    role: str
    host: Host
    command: List[str]
    environment: Dict[str, str]


def with_servers(
    hosts: Sequence[Host], system: System, workers: int, worker: List[str]
) -> List[Process]:
    """A scheduler on the first host, a server on each, and the workers; they run `worker`.

    p3kv's ranks are the hosts' numbers.
    """
    common = {
        "DMLC_PS_ROOT_URI": hosts[0].address,
        "DMLC_PS_ROOT_PORT": str(_scheduler_port()),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(len(hosts)),
        "P3KV_SECRET": secrets.token_hex(32),
    }

    def process(role: str, host: Host) -> Process:
        environment = {
            **common,
            "DMLC_ROLE": role,
            "DMLC_NODE_HOST": host.address,
            f"DMLC_{role.upper()}_ID": str(host.index),
        }
        command = worker if role == "worker" else system.role_command
        return Process(role, host, command, environment)

    return [
        process("scheduler", hosts[0]),
        *(process("server", host) for host in hosts),
        *(process("worker", host) for host in hosts[:workers]),
    ]


def _scheduler_port() -> int:
    """A port that is free in a host's namespace, which nobody else uses, and stays so: below those
    that the kernel gives to who asks for any."""
    return random.randrange(10_000, 32_768)
