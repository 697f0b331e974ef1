"""Names for the hosts of a throttled cluster, which only they know."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Iterator, Sequence

from experiments.cluster import Cluster


@contextlib.contextmanager
def named(cluster: Cluster, names: Sequence[str]) -> Iterator[None]:
    """Gives the cluster's hosts names in the /etc/hosts that processes on them see.

    As on Debian, each host has a name, too, that means 127.0.1.1: `own-name`.
    """
    lines = [f"{host.address} {name}" for host, name in zip(cluster.hosts, names)]
    # `ip netns exec` mounts what is there over the files of /etc.
    folders = [Path("/etc/netns") / host.namespace for host in cluster.hosts]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                "\n".join(["127.0.0.1 localhost", "127.0.1.1 own-name", *lines, ""])
            )
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
