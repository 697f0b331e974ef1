"""Names for the hosts of a throttled cluster, which only they know."""

from __future__ import annotations

from typing import Sequence

from experiments.cluster import Cluster


def give_names(cluster: Cluster, names: Sequence[str]) -> None:
    """Gives the cluster's hosts names in the /etc/hosts that processes on them see.

    As on Debian, each host has a name, too, that means 127.0.1.1: `own-name`.
    """
    lines = [f"{host.address} {name}" for host, name in zip(cluster.hosts, names)]
    for host in cluster.hosts:
        host.write_names(["127.0.0.1 localhost", "127.0.1.1 own-name", *lines])
