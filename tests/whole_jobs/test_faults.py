"""What is broken from outside does not hang a job, nor changes a bit of its weights.

`docs/faults.md` says in which other files the rest of the faults are tested.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Iterator, List, NamedTuple, Tuple

import psutil
import pytest

from experiments.cluster import Cluster, missing_requirements
from tests.faults import CHUNK_BYTES, Proxy, fill, goes_on, rounds, small_disk, stopped
from tests.jobs import DEADLINE_S, TrainingJob, environment, eventually, launch_command, start_on

ROOT = Path(__file__).parent.parent.parent
STOPPED_S, CUT_S = 3.0, 3.0
SILENCE_TIMEOUT_S = 6.0
EXACT = "bit for bit the weights of one process in"
_PROBLEM = missing_requirements()
needs_root = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


class Running(NamedTuple):
    """A job whose workers compare their weights in each round."""

    job: TrainingJob
    folder: Path
    proxy: Proxy
    disk: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("job")
    with small_disk(folder / "disk", 1 << 20) as disk, Proxy() as proxy, TrainingJob(
        folder, 2, 2, [0.01], script="enduring.py", P3KV_TRACE=disk, P3KV_WARN_AFTER_S=2,
        **proxy.settings,
    ) as job:  # fmt: skip
        job.wait_until_training()
        yield Running(job, folder, proxy, disk)
        job.stop()
        result = job.result(DEADLINE_S)
    assert result.code == 0, result.output
    assert result.output.count(EXACT) == 2, result.output


@needs_root
def test_data_that_is_late_does_no_harm(running: Running) -> None:
    passed_bytes = running.proxy.passed_bytes
    running.proxy.delay_s = 0.1
    took_s = goes_on(running.folder)
    running.proxy.delay_s = 0.0
    assert running.proxy.passed_bytes > passed_bytes
    assert took_s > 20 * 2 * 0.1
    print(f"20 rounds in {took_s:.1f} s")


@needs_root
def test_data_that_is_slow_does_no_harm(running: Running) -> None:
    proxy = running.proxy
    proxy.rate_bytes_s = 200_000
    before = [len(stream) for stream in proxy.to_workers]
    took_s = goes_on(running.folder)
    most_bytes = max(len(stream) - old for stream, old in zip(proxy.to_workers, before))
    proxy.rate_bytes_s = None
    print(f"20 rounds in {took_s:.1f} s")
    # Two chunks may have been let through before.
    assert 0 < (most_bytes - 2 * CHUNK_BYTES) / 200_000 < took_s


@needs_root
def test_data_that_stops_though_all_processes_answer_is_told_and_awaited(
    running: Running,
) -> None:
    with running.proxy.held():
        words = r"worker \d  \| .*server \d: nothing has moved on its connection for \d+ s, and key"
        eventually(lambda: re.search(words, running.job.output()))
    print(f"20 rounds {goes_on(running.folder):.1f} s later")


@needs_root
def test_a_launcher_that_is_stopped_does_not_stop_the_others(running: Running) -> None:
    with stopped([psutil.Process(running.job.launcher.pid)]):
        goes_on(running.folder)
        time.sleep(STOPPED_S)
        goes_on(running.folder)


@needs_root
def test_a_full_disk_ends_traces_and_nothing_else(running: Running) -> None:
    fill(running.disk)
    eventually(lambda: running.job.output().count("No space left on device") == 4)
    goes_on(running.folder)


@pytest.mark.parametrize("full", ["output", "errors"])
def test_a_launcher_whose_output_s_disk_is_full_says_so_and_the_job_goes_on(
    full: str, tmp_path: Path
) -> None:
    command = launch_command("enduring.py", [tmp_path, 0.0], workers=1, servers=1)
    (tmp_path / "stop").touch()
    with open("/dev/full", "wb") as no_room:
        done = subprocess.run(
            command,
            env=environment(P3KV_VERBOSE=1),
            stdout=no_room if full == "output" else subprocess.PIPE,
            stderr=no_room if full == "errors" else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    said = done.stderr if full == "output" else done.stdout
    assert done.returncode == 0, said
    words = f"p3kv launch: {full} can't be written, and what comes is lost: No space left on device"
    assert said.count(words) == 1, said
    assert (EXACT in said) == (full == "errors")


# Links of whole hosts.


@pytest.mark.long
@needs_root
def test_a_host_may_lose_packets_and_time_but_its_end_is_told_on_both_sides(
    tmp_path: Path,
) -> None:
    with Cluster(2) as cluster:
        host = cluster.hosts[1]
        started = start_on(
            cluster, "enduring.py", [tmp_path, 0.01], P3KV_WARN_AFTER_S=2,
            P3KV_SILENCE_TIMEOUT_S=SILENCE_TIMEOUT_S,
        )  # fmt: skip
        eventually(lambda: rounds(tmp_path) > 5)
        with cluster.lossy(host, 0.05):
            print(f"5 % of the packets lost: {goes_on(tmp_path, 60.0):.1f} s")
        cluster.set_rate(1.0, host)
        print(f"1 Mbit/s: {goes_on(tmp_path, 60.0):.1f} s")
        cluster.set_rate(None, host)
        with cluster.cut(host):
            time.sleep(CUT_S)
        print(f"cut for {CUT_S} s: {goes_on(tmp_path):.1f} s")
        with cluster.cut(host):
            start = time.monotonic()
            ended = [output_at_end(process, start) for _, process in started]
    assert all(process.returncode == 1 for _, process in started), ended
    for (role, process), (output, seconds) in zip(started, ended):
        print(f"{role} ended {seconds:.1f} s after the cut")
        assert seconds < DEADLINE_S
        silent = r" \(round \d+\): it has not answered for \d+ s, and was last heard of at \S+"
        who = rf"(worker|server) \d{silent} \({host.address}, process"
        if process.args[3] == host.namespace:
            who = rf"scheduler{silent}"
        assert re.search(rf"p3kv {role}: {who}", output.splitlines()[-1]), output


def output_at_end(process: subprocess.Popen, start: float) -> Tuple[str, float]:
    output = process.communicate(timeout=DEADLINE_S)[0]
    return output, time.monotonic() - start


def test_the_table_names_tests_that_are_there() -> None:
    named = re.findall(r"`(test_\w+)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 10
    missing: List[str] = [
        f"{file}::{test}"
        for file, test in named
        for path in [next((ROOT / "tests").glob(f"*/{file}.py"))]
        if f"\ndef {test}" not in path.read_text()
    ]
    assert missing == []
