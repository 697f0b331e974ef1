"""ssh between the hosts of a throttled cluster: each has an sshd with keys of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Iterator, Optional

from experiments.cluster import Cluster
from experiments.cluster.netns import in_namespace
from tests.jobs import eventually

_PORT = 2222
_TOOLS = ("ssh", "sshd", "ssh-keygen")


def missing() -> Optional[str]:
    """Why there can be no ssh here; None if there can."""
    for tool in _TOOLS:
        if _path(tool) is None:
            return f"the command '{tool}' is missing (packages openssh-client, openssh-server)"
    return None


@contextlib.contextmanager
def ssh_between(cluster: Cluster, folder: Path) -> Iterator[str]:
    """Runs an sshd on each host; yields a PATH whose `ssh` reaches them all without a password."""
    for name in ("host_key", "user_key"):
        subprocess.run(
            [str(_path("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
        )
    # sshd's own place, which packages make when they start it.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    running = []
    try:
        for host in cluster.hosts:
            config = folder / f"sshd_config_{host.index}"
            config.write_text(
                f"ListenAddress {host.address}\nPort {_PORT}\nHostKey {folder}/host_key\n"
                f"AuthorizedKeysFile {folder}/user_key.pub\nPidFile none\nStrictModes no\n"
                "UsePAM no\nPermitRootLogin yes\n"
            )
            sshd = [str(_path("sshd")), "-D", "-e", "-f", str(config)]
            with open(folder / f"sshd_{host.index}.log", "wb") as log:
                running.append(host.popen(sshd, stdout=log, stderr=log, env={"PATH": os.defpath}))
        for host in cluster.hosts:
            eventually(lambda h=host: in_namespace(h.namespace, lambda: _answers(h.address)))
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(
            f"#!/bin/sh\nexec {_path('ssh')} -F none -p {_PORT} -i {folder}/user_key "
            "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
            '"$@"\n'
        )
        wrapper.chmod(0o755)
        yield f"{folder}/bin:{os.environ['PATH']}"
    finally:
        for process in running:
            process.terminate()
            process.wait()


def _path(tool: str) -> Optional[str]:
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, _PORT), timeout=1):
        return True
    return False
