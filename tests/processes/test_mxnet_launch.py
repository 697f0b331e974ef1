"""The launch.py of MXNet 1.9.1, as its package has it, with dmlc_tracker: local, and over ssh.

From Python 3.9 on it ends before it starts anything, since threads have no `isAlive` any more.
docs/run/mxnet-launch.md says how it runs all the same; these tests run it so.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from experiments.cluster import Cluster, missing_requirements
from tests import sshd
from tests.jobs import ROOT, SECRET, SUMS_ONLY, end, environment, eventually, run
from tests.on_cluster import DEADLINE_S, HOLD, MARK, ClusterJob, needs
from tests.without_mxnet import REASON

_SPEC = importlib.util.find_spec("mxnet")
if _SPEC is None or _SPEC.origin is None:
    pytest.skip(REASON, allow_module_level=True)
LAUNCH = str(Path(_SPEC.origin).parent / "tools" / "launch.py")
PAGE = (ROOT / "docs" / "run" / "mxnet-launch.md").read_text()


def launch_py(*arguments: str) -> List[str]:
    """launch.py as the page starts it."""
    found = re.search(r"python -c '(import runpy.*?)'", PAGE, re.DOTALL)
    assert found is not None
    return [sys.executable, "-c", found[1], LAUNCH, *arguments]


@pytest.mark.skipif(sys.version_info < (3, 9), reason="launch.py runs on Python 3.8")
def test_launch_py_breaks_on_this_python() -> None:
    command = [sys.executable, LAUNCH, "-n", "1", "--launcher", "local", "true"]
    result = run(command, environment(), DEADLINE_S)
    assert result.code == 1 and "'isAlive'" in result.output


def secret_file(folder: Path) -> List[str]:
    """What to write before a command, so that its process finds the secret."""
    file = folder / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    return ["env", f"P3KV_SECRET_FILE={file}"]


def local(folder: Path, *arguments: str) -> List[str]:
    options = ["-n", "2", "-s", "1", "--launcher", "local"]
    return launch_py(*options, *secret_file(folder), *HOLD, str(folder), *arguments)


def test_launch_py_starts_a_job_on_this_host(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    result = run(local(tmp_path), environment(P3KV_SECRET="", **SUMS_ONLY), DEADLINE_S)
    assert result.code == 0, result.output
    for rank in range(2):
        assert f"worker {rank} of 2 has joined" in result.output


def test_launch_py_hides_the_failure_that_p3kv_tells(tmp_path: Path) -> None:
    result = run(local(tmp_path, "1=7"), environment(P3KV_SECRET="", **SUMS_ONLY), DEADLINE_S)
    assert "worker 1: its script ended with exit code 7" in result.output
    assert result.code == 0  # as the page says
    assert SECRET not in result.output


def test_launch_py_prints_the_environment_of_a_process_that_fails(tmp_path: Path) -> None:
    """So the secret has to be in a file. The scheduler waits: launch.py ends when it does."""
    stop = tmp_path / "stop"
    script = tmp_path / "train.sh"
    script.write_text(
        f'[ "$DMLC_ROLE" = scheduler ] || exit 1\nuntil [ -e {stop} ]; do sleep 0.1; done\n'
    )
    command = launch_py("-n", "1", "-s", "1", "--launcher", "local", "sh", str(script))
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        eventually(lambda: SECRET in printed.read_text())
        stop.touch()
        assert process.wait(DEADLINE_S) == 0
    finally:
        end(process)


@pytest.mark.long
@needs(missing_requirements(), sshd.missing())
def test_launch_py_starts_a_job_over_ssh(cluster: Cluster, ssh_path: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n0\nn1\n")
    # All that launch.py drops over ssh is in the command.
    values = {"PYTHONPATH": ROOT, MARK: tmp_path, **SUMS_ONLY}
    settings = [*secret_file(tmp_path), *(f"{name}={value}" for name, value in values.items())]
    over_ssh = launch_py(
        "-n", "2", "-s", "2", "-H", str(hosts), "--launcher", "ssh",
        *settings, *HOLD, str(tmp_path),
    )  # fmt: skip
    named = ["unshare", "--uts", "sh", "-c", 'hostname n0; exec "$@"', "sh", *over_ssh]
    job = ClusterJob(cluster, tmp_path, named, cwd=tmp_path, PATH=ssh_path, P3KV_SECRET="")
    job.wait_until_joined()
    job.stop()
    result = job.result()
    assert result.code == 0, result.output
