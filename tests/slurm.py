"""Slurm on the hosts of a throttled cluster: its daemons, with a configuration of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Dict, Iterator, List, Optional

from experiments.cluster import Cluster
from tests.jobs import eventually

_TOOLS = ("slurmctld", "slurmd", "srun", "munged")

_CONFIG = """\
ClusterName=p3kv
SlurmctldHost=n0({address})
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> Optional[str]:
    """Why there can be no Slurm here; None if there can."""
    for tool in _TOOLS:
        if _path(tool) is None:
            return f"the command '{tool}' is missing (packages slurmctld, slurmd, slurm-client)"
    return None


@contextlib.contextmanager
def slurm_on(cluster: Cluster, folder: Path) -> Iterator[Dict[str, str]]:
    """Runs Slurm with the cluster's hosts as nodes n0, n1, ...; yields variables for srun, which
    has to run on a host. The hosts must know these names."""
    config = folder / "slurm.conf"
    config.write_text(
        _CONFIG.format(
            folder=folder,
            address=cluster.hosts[0].address,
            nodes="\n".join(
                f"NodeName=n{host.index} NodeAddr={host.address} CPUs=8" for host in cluster.hosts
            ),
        )
    )
    # Not looked for, since `ip netns exec` hides it, and not used.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    (folder / "munge").mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(config)}
    running: List[subprocess.Popen] = []

    def start(index: int, *command: str) -> None:
        # Each node has a host name of its own.
        named = ["unshare", "--uts", "sh", "-c", f'hostname n{index}; exec "$@"', "sh", *command]
        with open(folder / f"{command[0].rpartition('/')[2]}-{index}.out", "wb") as out:
            running.append(cluster.hosts[index].popen(named, env=env, stdout=out, stderr=out))

    try:
        munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file")]
        munge += [f"--key-file={key}", f"--seed-file={folder}/munge/seed"]
        start(0, str(_path("munged")), "--foreground", "--force", *munge)
        eventually((folder / "munge" / "socket").exists)
        start(0, str(_path("slurmctld")), "-D")
        for host in cluster.hosts:
            start(host.index, str(_path("slurmd")), "-D", "-N", f"n{host.index}")

        def is_idle() -> bool:
            sinfo = cluster.hosts[0].popen(
                ["sinfo", "-h", "-o", "%t %D"], env=env, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            return sinfo.communicate()[0].split() == ["idle", str(len(cluster.hosts))]

        eventually(is_idle)
        yield {"SLURM_CONF": str(config)}
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait()


def _path(tool: str) -> Optional[str]:
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
