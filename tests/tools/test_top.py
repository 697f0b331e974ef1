"""`p3kv top` finds a running job and shows what its processes do; nobody without the secret can."""

from __future__ import annotations

import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, List, Optional, Tuple

import pytest

from p3kv.config import Launch
from p3kv.errors import ConfigError, PeerLostError
from p3kv.tools import top
from p3kv.tools.top import Asker, JobView, find
from p3kv.wire.messages import ProcessReport, Reports, ServerNumbers, WorkerNumbers
from tests.jobs import DEADLINE_S, SUMS_ONLY, TrainingJob, environment, eventually, run

TOP = [sys.executable, "-m", "p3kv", "top"]


def reports(at_s: float, steps: int, gone: bool = False, layer: str = "layer0") -> Reports:
    """Two workers, of which the second is behind, and a server."""

    def worker(rank: int) -> ProcessReport:
        numbers = WorkerNumbers(
            uptime_s=at_s, steps=steps, step_s=at_s, computing_s=0.75 * at_s,
            network_s=at_s / 4, queued_frames=3,
            wire_bytes_sent=int(at_s * 1e6), slowest_layer=layer,
        )  # fmt: skip
        return ProcessReport("worker", rank, "10.0.0.7", gone, numbers)

    server = ServerNumbers(uptime_s=at_s, rounds=10, last_rounds=(1, 9), last_s=(0.0, 1.8))
    return Reports([ProcessReport("server", 0, "10.0.0.8", False, server), worker(0), worker(1)])


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_the_table_has_a_line_for_each_process_and_fits_the_terminal(width: int) -> None:
    job = JobView("python train.py")
    for at_s, steps in ((2.0, 4), (4.0, 8)):
        job.take(reports(at_s, steps, layer="resnetv10_stage1_batchnorm0_gamma"))
    names, cells = job.table(width)
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    assert len(cells) == 3 and sum(widths) + 2 * (len(widths) - 1) <= max(width, 60)
    assert names[0] == "process" and "a step is" in names
    assert ("slowest layer" in names) == (width >= 120)
    assert ("inversions" in names) == (width >= 200)


def test_rates_are_shown_by_process_and_workers_come_first() -> None:
    job = JobView()
    job.take(reports(2.0, 4))
    assert job.lines[1:] == [
        "  worker 0: step 4, no rates yet", "  worker 1: step 4, no rates yet",
        "  server 0: no rates yet",
    ]  # fmt: skip
    job.take(reports(4.0, 8))
    job.take(reports(4.0, 8))  # no process has said anything since
    assert job.title == (
        "0.5 s a step, up to 25% waiting for the network; worker 1 comes last in 90% of the "
        "rounds, by 0.2 s"
    )
    assert job.lines[2] == (
        "  worker 1: step 8, 0.5 s a step (computing 75%, network 25%; waits most for layer0), "
        "8 Mbit/s out, 0 Mbit/s in, 3 frames queued, 0 inversions"
    )
    assert job.rows[0].cells(6) == [
        "worker 0", "10.0.0.7", "8", "2", "computing 75%, network 25%", "8 Mbit/s", "0 Mbit/s",
        "3", "0", "layer0",
    ]  # fmt: skip
    assert not job.over
    job.take(reports(4.0, 8, gone=True))
    assert job.over
    assert job.lines[1] == "  worker 0: has left"


def test_a_running_job_is_found_and_shown_until_it_ends(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, **SUMS_ONLY) as job:
        job.wait_until_training()
        pid = job.parts()["worker 1"].pid
        shown = run([*TOP, str(pid), "--every", "2.5", "--count", "3"], environment(), DEADLINE_S)
        assert shown.code == 0, shown.output
        last = shown.output[shown.output.rindex("  worker 0") :].splitlines()
        assert re.search(r"  worker 0: step \d+, .* a step \(.*\), .*bit/s out", last[0]), (
            shown.output
        )
        assert last[1].startswith("  worker 1: step "), shown.output
        assert re.search(r"  server 0: .*bit/s out, .* queued", last[2]), shown.output
        assert "comes last in" in shown.output
        # Where a step has waited within its forward pass, and not before.
        names = re.findall(r"; waits most for (.*?)\)", shown.output)
        assert all(re.fullmatch(r"\w+", name) for name in names), shown.output
        # On a terminal, a table.
        screen = shown_on_terminal([*TOP, str(pid), "--count", "1"])
        for word in ("worker 0", "server 0", "queued", "slowest"):
            assert word in screen, screen
        assert str(Path("tests", "workers")) in screen  # what the job runs
        assert find(job.launcher.pid).launch.job == find(pid).launch.job
        launch, command = find(pid)
        assert command.startswith(sys.executable)
        assert launch.secret
        with pytest.raises(PeerLostError, match="does not answer"):
            refused(launch, "not the job's secret")
        # It goes on to the end of the job.
        watching = subprocess.Popen(
            [*TOP, str(pid), "--every", "0.2"], env=environment(), stdout=subprocess.PIPE, text=True
        )
        assert watching.stdout is not None
        watching.stdout.readline()
        job.stop()
        assert watching.wait(60.0) == 0
        watching.stdout.close()
        result = job.result(30.0)
        assert result.code == 0, result.output
        # Who asks is no process of the job, and nobody misses it.
        assert "did not say hello" not in result.output


def refused(launch: Launch, secret: str) -> None:
    stranger = Asker(Launch(**{**launch.__dict__, "secret": secret.encode()}))
    patience_ms, top.PATIENCE_MS = top.PATIENCE_MS, 2000
    try:
        stranger.ask()
    finally:
        top.PATIENCE_MS = patience_ms
        stranger.close()


def shown_on_terminal(command: List[str]) -> str:
    main, end = pty.openpty()
    wide = environment(COLUMNS=160, TERM="xterm")
    process = subprocess.Popen(command, env=wide, stdin=end, stdout=end, stderr=end)
    os.close(end)
    shown = b""

    def read() -> Optional[bytes]:
        nonlocal shown
        try:
            more = os.read(main, 1 << 16)
        except OSError:  # the other end is closed
            return None
        shown += more
        return more

    eventually(lambda: not read(), DEADLINE_S)
    os.close(main)
    assert process.wait(10.0) == 0, shown
    return shown.decode()


ANOTHER = 65534
"""An account that is not root."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another account")
@pytest.mark.parametrize("uids", [(ANOTHER,) * 3, (ANOTHER, 0, 0)], ids=str)
def test_a_process_of_another_account_is_asked_for_nothing(
    tmp_path: Path, uids: Tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though root may read its environment, which names a file of root's and a port."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of root's own, for its own job")
    secret.chmod(0o600)
    opened: List[str] = []
    real_open = os.open
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = {
            "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(listener.getsockname()[1]), "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1", "P3KV_SECRET_FILE": str(secret),
        }  # fmt: skip
        other = subprocess.Popen(["sleep", "60"], env=place, preexec_fn=lambda: os.setresuid(*uids))
        try:

            def note(path: Any, *arguments: Any, **more: Any) -> int:
                opened.append(str(path))
                return real_open(path, *arguments, **more)

            monkeypatch.setattr(os, "open", note)
            with pytest.raises(ConfigError, match=f"process {other.pid} belongs to user {ANOTHER}"):
                find(other.pid)
            assert str(secret) not in opened
            result = run([*TOP, "--count", "1"], environment(), 30.0)
            assert f"{other.pid}" not in result.output
            assert f":{place['DMLC_PS_ROOT_PORT']}" not in result.output
            result = run([*TOP, str(other.pid)], environment(), 30.0)
            assert result.code == 2 and "only processes of its own user" in result.output
            listener.settimeout(0.1)
            with pytest.raises(socket.timeout):
                listener.accept()
        finally:
            other.kill()
            other.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program an account's rights")
def test_the_environment_of_a_program_with_more_rights_is_that_of_who_started_it() -> None:
    """It may have made itself root's altogether, as sudo does."""
    with tempfile.TemporaryDirectory() as folder:
        if os.statvfs(folder).f_flag & os.ST_NOSUID:
            pytest.skip(f"no program in {folder} gives rights")
        os.chmod(folder, 0o755)
        assert_is_not_found(Path(folder) / "python")


def assert_is_not_found(program: Path) -> None:
    """Though it runs as root, an account starts it with an environment of its own."""
    shutil.copy(os.path.realpath(sys.executable), program)
    program.chmod(0o4755)
    place = {
        "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9",
        "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "P3KV_SECRET": "no word of root's",
        "PYTHONHOME": sys.base_prefix,
    }  # fmt: skip
    becomes = "import os, time; os.setresuid(0, 0, 0); print(os.getuid(), flush=True)"
    other = subprocess.Popen(
        [str(program), "-c", f"{becomes}; time.sleep(60)"], env=place, stdout=subprocess.PIPE,
        preexec_fn=lambda: os.setresuid(*(ANOTHER,) * 3),
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"0\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} belongs to no job of yours"):
            find(other.pid)
    finally:
        other.kill()
        other.communicate()


def test_what_can_not_be_shown_is_an_error_in_a_line() -> None:
    with pytest.raises(ConfigError, match=f"process {os.getpid()} belongs to no job"):
        find(os.getpid())
    result = run([*TOP, str(os.getpid())], environment(), DEADLINE_S)
    assert result.code == 2
    assert result.output == f"p3kv top: process {os.getpid()} belongs to no job of yours\n"
    result = run([*TOP, "--every", "0"], environment(), DEADLINE_S)
    assert result.code == 2
    assert "'0' is not a number above 0" in result.output
