"""Nobody joins a job without its secret, and nobody learns the secret from the job."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional

import pytest

from p3kv.common.secret import account_secret, job_secret
from p3kv.config import Launch
from p3kv.errors import ConfigError
from p3kv.processes.launcher import job_parts
from p3kv.wire.credentials import CHALLENGE_BYTES, HELLO_BYTES
from p3kv.wire.header import MAGIC, Kind
from p3kv.wire.messages import PROTOCOL_VERSION, Abort, Failure, ReportFailure
from tests.jobs import (
    SCRIPTS,
    SECRET,
    end,
    eventually,
    held_port,
    output_of,
    results,
    start_role,
)  # fmt: skip
from tests.served import KEY, TOLD_S, Served, Serving, frame, hello, proof, received, shake_hands

JOIN = [sys.executable, str(SCRIPTS / "join.py")]
GOOD = "0123456789abcdef"

# Where a process finds it.


def secret_file(path: Path, mode: int = 0o600, content: bytes = GOOD.encode() + b"\n") -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_secret_is_in_the_environment_or_in_a_file_of_its_user(tmp_path: Path) -> None:
    assert job_secret({}) == job_secret({"P3KV_SECRET": ""}) == b""
    assert job_secret({"P3KV_SECRET": GOOD}) == GOOD.encode()
    for mode in (0o600, 0o400):
        path = secret_file(tmp_path / f"{mode:o}", mode)
        assert job_secret({"P3KV_SECRET_FILE": path}) == GOOD.encode()


def test_a_secret_that_others_may_know_or_guess_is_refused_with_the_remedy(tmp_path: Path) -> None:
    open_file = secret_file(tmp_path / "open", 0o644)
    short = secret_file(tmp_path / "short", content=b"abc")
    others = secret_file(tmp_path / "others")
    if os.geteuid() == 0:
        os.chown(others, 12345, -1)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for environ, words in (
        ({"P3KV_SECRET_FILE": open_file}, ["its mode is 644", "chmod 600"]),
        ({"P3KV_SECRET_FILE": secret_file(tmp_path / "group", 0o620)}, ["chmod 600"]),
        ({"P3KV_SECRET_FILE": others}, ["user 12345"] if os.geteuid() == 0 else []),
        ({"P3KV_SECRET_FILE": short}, ["has 3 letters", "token_hex(32)"]),
        ({"P3KV_SECRET_FILE": str(tmp_path / "pipe")}, ["is no file"]),
        ({"P3KV_SECRET_FILE": str(tmp_path)}, ["Is a directory"]),
        ({"P3KV_SECRET_FILE": str(tmp_path / "none")}, ["No such file"]),
        ({"P3KV_SECRET_FILE": "a\0b"}, ["can't be read"]),
        ({"P3KV_SECRET": "easy"}, ["P3KV_SECRET has 4 letters", "token_hex(32)"]),
        ({"P3KV_SECRET": GOOD, "P3KV_SECRET_FILE": short}, ["set one of them"]),
    ):
        if not words:
            continue
        with pytest.raises(ConfigError) as told:
            job_secret(environ)
        for word in words:
            assert word in str(told.value), told.value
        assert "easy" not in str(told.value) and GOOD not in str(told.value)


PLACE = {
    "DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, None),
        ({"DMLC_PS_ROOT_URI": "localhost"}, None),
        ({"DMLC_PS_ROOT_URI": "::1", "DMLC_INTERFACE": "lo"}, None),
        ({"DMLC_PS_ROOT_URI": "10.0.0.1"}, "10.0.0.1"),
        ({"DMLC_PS_ROOT_URI": "node7"}, "node7"),
        ({"DMLC_PS_ROOT_URI": "0.0.0.0"}, "0.0.0.0"),
        ({"DMLC_NODE_HOST": "10.0.0.1"}, "10.0.0.1"),
        ({"DMLC_INTERFACE": "eth0"}, "the interface eth0"),
    ],
    ids=str,
)
def test_a_job_that_other_hosts_can_reach_needs_a_secret(
    changes: Dict[str, str], where: Optional[str]
) -> None:
    launch = Launch.from_environment({**PLACE, **changes, "P3KV_SECRET": GOOD})
    assert launch is not None and launch.secret == GOOD.encode()
    assert GOOD not in repr(launch)
    if where is None:
        assert Launch.from_environment({**PLACE, **changes}) is not None
        return
    with pytest.raises(ConfigError) as told:
        Launch.from_environment({**PLACE, **changes})
    for words in (f"uses {where}", "Set P3KV_SECRET to the same text", "P3KV_SECRET_FILE"):
        assert words in str(told.value)


def test_the_launcher_makes_a_secret_for_each_job_and_shows_it_to_nobody() -> None:
    env = {"P3KV_SECRET": GOOD, "P3KV_SECRET_FILE": "/nowhere"}
    jobs = [job_parts(["true"], 2, 1, port=1, env=env) for _ in range(2)]
    secrets = [{part.env["P3KV_SECRET"] for part in parts} for parts in jobs]
    assert [len(one) for one in secrets] == [1, 1] and secrets[0] != secrets[1]
    (secret,) = secrets[0]
    assert len(secret) == 64
    for part in jobs[0]:
        assert "P3KV_SECRET_FILE" not in part.env
        assert secret not in repr(part) and secret not in " ".join(part.argv)


# The connection to the scheduler.


def was_closed(stranger: socket.socket) -> bool:
    """Whether the peer has ended a connection; it may have greeted before."""
    stranger.setblocking(False)
    try:
        while stranger.recv(100):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_neither_another_secret_nor_silent_connections_keep_a_job_from_coming_together() -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        start = time.monotonic()
        processes = {"scheduler": start_role("scheduler", JOIN, port)}
        strangers = {
            "another": start_role("worker", JOIN, port, P3KV_SECRET="another job's secret"),
            "none": start_role("server", JOIN, port, P3KV_SECRET=""),
        }
        crowd: List[socket.socket] = []
        try:
            refused = results(strangers, start, TOLD_S)
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
            eventually(lambda: all(was_closed(stranger) for stranger in crowd[:160]))
            processes["server"] = start_role("server", JOIN, port)
            processes["worker"] = start_role("worker", JOIN, port)
            ended = results(processes, start, TOLD_S)
        finally:
            for stranger in crowd:
                stranger.close()
            for process in (*strangers.values(), *processes.values()):
                end(process)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
    said = ended["scheduler"].output
    assert "a process on 127.0.0.1 does not know this job's secret" in said, said
    # So the scheduler closed the oldest, and not only ZeroMQ, which waits 5 s for a greeting.
    assert "too many newer ones did not say hello either" in said, said
    for name, mine in {
        "another": "another secret than",
        "none": "a secret, and this one has none",
    }.items():
        result = refused[name]
        assert result.code == 1 and "Traceback" not in result.output
        for words in (f"it has {mine}", "set P3KV_SECRET (or P3KV_SECRET_FILE) to the same"):
            assert words in result.output, result.output
    assert not any(SECRET in one.output for one in (*ended.values(), *refused.values()))


def test_a_job_of_one_account_on_one_machine_needs_no_secret() -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        start = time.monotonic()
        processes = {
            role: start_role(role, JOIN, port, P3KV_SECRET="")
            for role in ("scheduler", "server", "worker")
        }
        try:
            ended = results(processes, start, TOLD_S)
        finally:
            for process in processes.values():
                end(process)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
    assert not any("secret" in result.output for result in ended.values())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another account: needs root")
def test_an_account_whose_folder_another_one_has_made_takes_its_home_and_stays_there(
    tmp_path: Path,
) -> None:
    in_tmp, in_home = tmp_path / "p3kv-0", tmp_path / "home" / ".cache" / "p3kv"
    folders = [str(in_tmp), str(in_home)]
    first = account_secret(folders)
    assert first == account_secret(folders) and not in_home.exists()
    os.chown(in_tmp, 12345, -1)
    second = account_secret(folders)
    assert second != first and second == account_secret(folders)
    assert in_home.stat().st_mode & 0o777 == 0o700
    os.chown(in_tmp, 0, -1)
    assert account_secret(folders) == second, "processes that run already have this one"
    os.chown(in_home, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        account_secret(folders)
    os.chown(in_home, 0, -1)
    in_home.joinpath("account").unlink()
    in_tmp.joinpath("account").unlink()
    in_tmp.rmdir()
    in_tmp.symlink_to(tmp_path / "elsewhere")
    os.lchown(in_tmp, 12345, -1)
    account_secret(folders)
    assert in_home.joinpath("account").exists()


# Data connections.


def refused(link: socket.socket) -> bool:
    """Whether the peer ends a connection without another word."""
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_server_answers_only_whoever_has_the_key_and_takes_no_proof_twice() -> None:
    served = Served(workers=2)
    links: List[socket.socket] = []

    def connect() -> socket.socket:
        links.append(socket.create_connection(address, timeout=TOLD_S))
        return links[-1]

    try:
        address = served.welcome()
        # A stranger, a process of another run, and one that means another rank: no answer.
        of_rank_0 = hello(0)[-HELLO_BYTES:]
        as_rank_1 = frame(Kind.HELLO, 1, of_rank_0, magic=MAGIC, version=PROTOCOL_VERSION)
        for words in (hello(0, key=bytes(32)), hello(0, key=KEY[::-1]), as_rank_1):
            connect().sendall(words)
            assert refused(links[-1])
        # Repeated by somebody who has seen them: the hello yields a new challenge, which the proof
        # does not answer. Nor does it answer one on another connection that is open.
        seen, other = connect(), connect()
        seen.sendall(hello(0))
        challenge = received(seen)[1]
        other.sendall(hello(0))
        assert received(other)[1] != challenge and len(challenge) == CHALLENGE_BYTES
        right = proof(0, challenge)
        other.sendall(right)
        assert refused(other)
        seen.sendall(right)
        assert received(seen)[0].kind == Kind.WELCOME
        repeated = connect()
        repeated.sendall(hello(0))
        received(repeated)
        repeated.sendall(right)
        assert refused(repeated)
        # The challenge sent back, and words that were changed on the way.
        for change in ("reflected", "changed"):
            link = connect()
            link.sendall(hello(1))
            challenge = received(link)[1]
            if change == "reflected":
                link.sendall(frame(Kind.PROOF, 1, challenge))
            else:
                link.sendall(proof(1, challenge)[:-1] + b"\x01")
            assert refused(link)
        shake_hands(connect(), 1)
        assert received(links[-1])[0].kind == Kind.WELCOME
        served.say(Abort(Failure("the test is done.", "worker", 0)))
        output = output_of(served.process, TOLD_S)
    finally:
        for link in links:
            link.close()
        served.close()
    assert output is not None
    assert "it does not know this job's secret" in output, output
    assert "(from 127.0.0.1)" in output and "Traceback" not in output, output


def test_a_worker_ends_the_job_for_what_answers_in_a_server_s_place() -> None:
    attacked = Serving(1)
    try:
        (link,) = attacked.connections()
        header, payload = received(link)
        assert header.kind == Kind.HELLO
        # All that a stranger has is the worker's own words.
        link.sendall(frame(Kind.CHALLENGE, 0, payload))
        report = attacked.hear()
        assert isinstance(report, ReportFailure), report
        assert "does not know the job's secret" in report.failure.reason
        attacked.say(Abort(report.failure))
        output = output_of(attacked.process, TOLD_S)
        assert output is not None and "Traceback" not in output, output
        link.close()
    finally:
        attacked.close()
