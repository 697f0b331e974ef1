"""When a process of a job dies or fails, all others soon end and say which one, and where."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Dict, List

import mxnet as mx
import psutil
import pytest

from p3kv.wire.messages import Abort, Agreed, Failure, Ready, ReportFailure, Roster, Welcomed
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    SCRIPTS,
    SUMS_ONLY,
    JobResult,
    TrainingJob,
    end,
    environment,
    held_port,
    output_of,
    results,
    run,
    run_job,
    start_role,
)
from tests.served import TOKEN, Scheduled

KILLED = 128 + 9


@pytest.mark.parametrize("victim", ["worker 1", "server 1", "scheduler"])
def test_a_process_killed_in_mid_training_is_named_by_all_others_which_end(
    tmp_path: Path, victim: str
) -> None:
    who_updates = {} if victim == "server 1" else SUMS_ONLY
    with TrainingJob(tmp_path, workers=2, servers=2, **who_updates) as job:
        job.wait_until_training()
        parts = job.parts()
        assert len(parts) == 5
        parts[victim].kill()
        killed_at = time.monotonic()
        _, alive = psutil.wait_procs(parts.values(), timeout=DEADLINE_S)
        assert not alive, job.output()
        took_s = time.monotonic() - killed_at
        result = job.result(timeout_s=5.0)
    print(f"all ended {took_s:.1f} s after {victim} was killed")
    how = "its process ended" if victim == "scheduler" else "its process was killed by SIGKILL"
    for name in parts.keys() - {victim}:
        assert_one_line(result, name, rf"{victim} \(round \d+\): {how}$")
    assert result.code == KILLED
    assert re.match(
        rf"p3kv launch: {victim} .*failed first: .*killed by SIGKILL", last_line(result)
    )


@pytest.mark.parametrize(
    "victim", ["worker 1", pytest.param("server 0", marks=pytest.mark.long), "scheduler"]
)
def test_a_process_that_is_stopped_is_said_to_be_so_by_all_others_which_end(
    tmp_path: Path, victim: str
) -> None:
    who_updates = {} if victim == "worker 1" else SUMS_ONLY
    with TrainingJob(
        tmp_path, workers=2, servers=1, P3KV_SILENCE_TIMEOUT_S=6, **who_updates
    ) as job:
        job.wait_until_training()
        parts = job.parts()
        stopped = parts.pop(victim)
        stopped.suspend()
        start = time.monotonic()
        _, alive = psutil.wait_procs(parts.values(), timeout=DEADLINE_S)
        assert not alive, job.output()
        print(f"all others ended {time.monotonic() - start:.1f} s after {victim} was stopped")
        result = job.result(timeout_s=DEADLINE_S)
    reason = r"it has not answered for \d+ s, and was last heard of at \d\d:\d\d:\d\d"
    if victim != "scheduler":
        reason += rf" \(127.0.0.1, process {stopped.pid}\)"
    # It may be stopped before it has told the scheduler of any round.
    where = rf"{victim}( \(round \d+\))?"
    for name in parts:
        assert_one_line(result, name, rf"{where}: {reason}$")
    if victim == "scheduler":
        assert last_line(result).startswith(
            "p3kv launch: scheduler failed first: it answered nobody any more"
        )
    else:
        assert re.match(f"p3kv launch: {where} failed first: {reason}", last_line(result))
        assert "Its process is stopped" in last_line(result)
    assert result.code == 1


def assert_one_line(result: JobResult, name: str, words: str) -> None:
    """A process has printed one line about the failure, and nothing else but MXNet's own line."""
    said = [line for line in result.said_by(name).splitlines() if "engine.cc" not in line]
    assert len(said) == 1 and re.search(words, said[0]), f"{name} said:\n{result.output}"


def last_line(result: JobResult) -> str:
    return result.output.splitlines()[-1]


def start_all_but_one_worker(port: int) -> Dict[str, subprocess.Popen]:
    """A job of two workers and one server, of which worker 0 has not come."""
    told = {"P3KV_VERBOSE": 1}
    return {
        "scheduler": start_role("scheduler", JOIN, port, workers=2),
        "server 0": start_role("server", JOIN, port, workers=2, DMLC_SERVER_ID=0, **told),
        "worker 1": start_role("worker", JOIN, port, workers=2, DMLC_WORKER_ID=1, **told),
    }


def wait_until_known(processes: Dict[str, subprocess.Popen]) -> None:
    """Returns when each process and the scheduler know each other: connected is too early."""
    for name in processes.keys() - {"scheduler"}:
        said = processes[name].stdout
        assert said is not None
        while "the scheduler has answered" not in (line := said.readline()):
            assert line, f"{name} has ended"


@pytest.mark.parametrize("victim", ["worker 1", "server 0", "scheduler"])
def test_a_process_killed_during_the_rendezvous_is_named_by_all_others_which_end(
    victim: str,
) -> None:
    with held_port() as port:
        processes = start_all_but_one_worker(port.getsockname()[1])
        try:
            wait_until_known(processes)
            processes[victim].kill()
            ended = results(processes, time.monotonic(), timeout_s=DEADLINE_S)
        finally:
            for process in processes.values():
                end(process)
    for name in processes.keys() - {victim}:
        assert f"{victim}: " in ended[name].output, f"{name} said:\n{ended[name].output}"
        assert ended[name].code == 1
    print({name: f"{one.seconds:.1f} s" for name, one in ended.items()})


def fail(folder: Path, how: str, **settings: object) -> JobResult:
    """Worker 1 goes wrong in step 20; everybody ends."""
    with TrainingJob(folder, workers=2, servers=1, arguments=(1, 20, how), **settings) as job:
        job.wait_until_training()
        start = time.monotonic()
        result = job.result(DEADLINE_S)
        print(f"all ended {time.monotonic() - start:.1f} s after the training was warm")
    return result


def test_a_script_that_raises_ends_the_job_with_its_exception_on_every_side(
    tmp_path: Path,
) -> None:
    result = fail(tmp_path, "raise")
    reason = "its script ended with ValueError: there is no such label"
    for name in ("worker 0", "server 0", "scheduler"):
        assert_one_line(result, name, rf"worker 1 \(round 19\): {reason}$")
    own = result.said_by("worker 1")
    assert own.count("Traceback") == 1
    assert own.endswith("ValueError: there is no such label")
    assert result.code == 1
    assert last_line(result) == f"p3kv launch: worker 1 (round 19) failed first: {reason}"


def test_a_script_that_asks_the_build_for_cpus_for_a_gpu_hears_what_to_install(
    tmp_path: Path,
) -> None:
    if mx.runtime.Features().is_enabled("CUDA"):
        pytest.skip("this MXNet is a CUDA build")
    script = tmp_path / "train.py"
    for asks, says in (
        ("mx.nd.ones(1, ctx=mx.gpu(0))", "Operator _ones is not implemented for GPU."),
        ("mx.nd.array([1], ctx=mx.gpu(0))", "Compile with USE_CUDA=1 to enable GPU usage"),
        ("mx.nd.ones(1).as_in_context(mx.gpu(0))", "GPU is not enabled"),
    ):
        script.write_text(f"import p3kv, mxnet as mx; {asks}")
        result = run_job(str(script), workers=1)
        assert result.code == 1
        assert f"MXNetError: {says} (this MXNet is the build for CPUs" in last_line(result)
        assert "cu117" in last_line(result)


def test_a_worker_that_makes_fewer_steps_than_the_others_is_named_with_the_remedy(
    tmp_path: Path,
) -> None:
    result = fail(tmp_path, "leave")
    reason = "it ended in order, but worker 0 went on to round 20"
    for name in ("worker 0", "server 0", "scheduler"):
        assert_one_line(result, name, rf"worker 1 \(round 19\): {reason}")
    assert result.code == 1
    assert f"p3kv launch: worker 1 (round 19) failed first: {reason}" in last_line(result)
    assert "give each the same number of batches" in last_line(result)


def test_a_script_that_exits_with_a_code_ends_the_job_as_one_that_raises(tmp_path: Path) -> None:
    result = fail(tmp_path, "exit", **SUMS_ONLY)
    for name in ("worker 0", "server 0", "scheduler"):
        assert_one_line(result, name, r"worker 1 \(round 19\): its script ended with exit code 3$")
    assert result.said_by("worker 1") == ""
    assert result.code == 3
    assert last_line(result).endswith(
        "worker 1 (round 19) failed first: its script ended with exit code 3"
    )


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("no_such_script.py", 2, "its process ended with exit code 2 before it joined the job"),
        ("fails_early.py", 1, "its process ended with exit code 1 before it joined the job"),
        (
            "never_joins.py",
            1,
            "its process ended with exit code 0 before it joined the job. Does "
            "its script import p3kv, and use kvstore='p3'?",
        ),
    ],
)
def test_a_script_that_never_joins_is_not_waited_for_and_has_one_cause(
    tmp_path: Path, script: str, code: int, reason: str
) -> None:
    (tmp_path / "fails_early.py").write_text("raise ValueError('too early')\nimport p3kv\n")
    (tmp_path / "never_joins.py").write_text("print('trained')\n")
    command = [
        sys.executable, "-m", "p3kv", "launch", "-n", "2", "-s", "2", "--",
        sys.executable, str(tmp_path / script),
    ]  # fmt: skip
    result = run(command, environment(), timeout_s=DEADLINE_S)
    print(f"told after {result.seconds:.1f} s")
    assert result.code == code
    assert reason in last_line(result)
    ours = re.findall(r"p3kv (?:launch|scheduler|server|worker): ", result.output)
    assert ours == ["p3kv launch: "], result.output
    assert result.output.count("Traceback") == (2 if script == "fails_early.py" else 0)


def run_by_hand(commands: Dict[str, List[str]]) -> Dict[str, JobResult]:
    """A job whose processes are started without p3kv's launcher, each with its command."""
    counts = Counter(name.partition(" ")[0] for name in commands)
    start = time.monotonic()
    with held_port() as holder:
        port = holder.getsockname()[1]
        processes = {}
        for name, command in commands.items():
            role, _, rank = name.partition(" ")
            wish = {f"DMLC_{role.upper()}_ID": rank} if rank else {}
            processes[name] = start_role(
                role, command, port, counts["worker"], counts["server"], **wish, **SUMS_ONLY
            )
        try:
            return results(processes, start, timeout_s=DEADLINE_S)
        finally:
            for process in processes.values():
                end(process)


def script(name: str, *arguments: str) -> List[str]:
    return [sys.executable, str(SCRIPTS / name), *arguments]


SERVE = [sys.executable, "-m", "p3kv"]


@pytest.mark.parametrize("how", ["exit", "raise under p3kv run", "caught"])
def test_an_exit_code_is_told_to_all_without_a_launcher_unless_the_script_goes_on(how: str) -> None:
    work = script("exits.py", "3", how.partition(" ")[0])
    if how.endswith("p3kv run"):
        work[1:1] = ["-m", "p3kv", "run"]
    ended = run_by_hand(
        {"scheduler": SERVE, "server 0": SERVE, "worker 0": work, "worker 1": script("waits.py")}
        if how != "caught"
        else {"scheduler": SERVE, "server 0": SERVE, "worker 0": work}
    )
    if how == "caught":
        assert {result.code for result in ended.values()} == {0}
        return
    assert ended.pop("worker 0").code == 3
    for name, result in ended.items():
        assert "worker 0: its script ended with exit code 3" in result.output, name
        assert result.code == 1
        assert len(result.output.splitlines()) == 1


def test_a_protocol_error_that_a_server_finds_is_told_by_all() -> None:
    work = script("waits.py", "1")
    ended = run_by_hand({"scheduler": SERVE, "server 0": SERVE, "worker 0": work, "worker 1": work})
    for name, result in ended.items():
        words = "worker 1: it broke the protocol: it sent a frame of kind 99, which must not"
        assert words in result.output, f"{name} said {result.output}"
        assert len(result.output.splitlines()) == 1


def test_a_worker_that_finds_a_server_gone_says_what_the_scheduler_knows_of_it() -> None:
    with held_port() as nobody:
        worker = Scheduled("worker")
        try:
            worker.hear()
            servers = [(*nobody.getsockname(), "tcp")]
            for message in (Welcomed(), Roster(0, TOKEN, servers, ["worker 0"])):
                worker.say(message)
            assert isinstance(worker.hear(), Ready)
            worker.say(Agreed())
            report = worker.hear()
            assert isinstance(report, ReportFailure) and report.second_hand
            assert "worker 0 can't connect to it" in report.failure.reason
            worker.say(Abort(Failure("it lacks a rule.", "server", 0)))
            said = output_of(worker.process, DEADLINE_S)
        finally:
            worker.close()
    assert said == "p3kv worker: server 0: it lacks a rule.\n"


def test_a_server_that_fails_by_a_fault_of_its_own_says_why_to_all() -> None:
    ended = run_by_hand(
        {
            "scheduler": SERVE,
            "server 0": SERVE,
            "server 1": script("failing_server.py"),
            "worker 0": script("waits.py"),
        }
    )
    own = ended.pop("server 1").output
    assert own.count("Traceback") == 1 and "LookupError: there is no such thing" in own
    for name, result in ended.items():
        words = "server 1: p3kv failed in the server: LookupError: there is no such thing"
        assert words in result.output, f"{name} said {result.output}"
        assert len(result.output.splitlines()) == 1


def test_a_worker_that_can_t_begin_to_send_fails_and_everybody_learns_why() -> None:
    result = run_job("no_memory.py", workers=2, servers=1, **SUMS_ONLY)
    print(f"all ended after {result.seconds:.1f} s")
    reason = "Failed to allocate CPU Memory"
    for name in ("worker 0", "server 0", "scheduler"):
        said = result.said_by(name)
        told = f"worker 1: its script ended with MXNetError: .*{reason}"
        assert re.search(told, said), result.output
    assert reason in result.said_by("worker 1")
    assert re.match(rf"p3kv launch: worker 1 failed first: .*{reason}", last_line(result))
