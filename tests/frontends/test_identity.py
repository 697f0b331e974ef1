"""Who a process is, its job and its rank, is a statement that is checked before anything joins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from typing import Dict, Iterator, Sequence

import psutil
import pytest

from tests.jobs import (
    JOIN,
    PROMISED_S,
    SUMS_ONLY,
    JobResult,
    end,
    environment,
    eventually,
    held_port,
    results,
    start_role,
)
from tests.on_cluster import needs

RENDEZVOUS_S = 3 * PROMISED_S
"""Longer than it may take until a wrong number is told."""


class Ranks:
    """Processes that a launcher of ranks has started, each with an environment of its own, and
    roles that were started by hand; all at the same address and port."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.port = stack.enter_context(held_port()).getsockname()[1]
        self.processes: Dict[str, subprocess.Popen] = {}
        self.since = time.monotonic()

    def start(
        self,
        name: str,
        rank: int,
        size: int = 2,
        account: Sequence[str] = (),
        **changes: object,
    ) -> subprocess.Popen:
        """A process with RANK and WORLD_SIZE; `account` is what makes it one of another account."""
        place = {
            "RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
            "DMLC_PS_ROOT_PORT": self.port, "P3KV_RENDEZVOUS_TIMEOUT_S": RENDEZVOUS_S,
            "P3KV_SECRET": "", **SUMS_ONLY,
        }  # fmt: skip
        process = subprocess.Popen(
            [*account, *JOIN],
            env=environment(**{**place, **changes}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        return self.keep(name, process)

    def keep(self, name: str, process: subprocess.Popen) -> subprocess.Popen:
        """Takes a process that a test has started."""
        self._stack.callback(end, process)
        self.processes[name] = process
        return process

    def ended(self, *names: str) -> Dict[str, JobResult]:
        """How these processes, by default all, have ended."""
        wanted = {name: self.processes[name] for name in names or self.processes}
        return results(wanted, self.since, 2 * PROMISED_S)

    def listens(self) -> bool:
        """Whether the scheduler's port is open."""
        wanted = f"0100007F:{self.port:04X} 00000000:0000 0A"
        with open("/proc/net/tcp", encoding="ascii") as table:
            return any(wanted in line for line in table)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


def lines(result: JobResult, words: str) -> int:
    """In how many lines a process has said something."""
    return sum(words in line for line in result.output.splitlines())


def test_a_rank_that_the_job_does_not_have_is_refused_at_once_on_both_sides(ranks: Ranks) -> None:
    ranks.start("0", 0)
    eventually(ranks.listens)
    ranks.start("5", 5)
    ranks.since = time.monotonic()
    (refused,) = ranks.ended("5").values()
    words = "worker 5 is out of range: this job has 2 workers, so there are ranks 0 to 1"
    assert refused.code == 1 and refused.seconds < PROMISED_S
    assert refused.output.startswith(f"p3kv worker: {words}"), refused.output
    assert len(refused.output.splitlines()) == 1
    # The job goes on: the right process may still come.
    ranks.start("1", 1)
    ended = ranks.ended("0", "1")
    assert [one.code for one in ended.values()] == [0, 0], ended["0"].output
    assert lines(ended["0"], words) == 1, ended["0"].output
    assert "worker 0 of 2 has joined" in ended["0"].output
    assert "worker 1 of 2 has joined" in ended["1"].output


def test_a_rank_that_no_job_can_have_waits_for_no_scheduler(ranks: Ranks) -> None:
    ranks.start("7", 7)
    (refused,) = ranks.ended().values()
    assert refused.code == 1 and refused.seconds < PROMISED_S
    assert "worker 7 is out of range: this job has 2 workers" in refused.output


def test_a_second_process_with_a_rank_is_refused_with_its_servers_and_the_first_is_told(
    ranks: Ranks,
) -> None:
    ranks.start("0", 0, 3)
    ranks.start("1", 1, 3)
    eventually(ranks.listens)
    eventually(lambda: _connections(ranks.port) >= 4)
    again = ranks.start("1 again", 1, 3)
    ranks.since = time.monotonic()
    (refused,) = ranks.ended("1 again").values()
    words = f"rank 1 is taken: another worker has it (127.0.0.1, process {ranks.processes['1'].pid}"
    assert refused.code == 1 and refused.seconds < PROMISED_S
    assert lines(refused, f"p3kv worker: {words}") == 1, refused.output
    ranks.start("2", 2, 3)
    ended = ranks.ended("0", "1", "2")
    assert {one.code for one in ended.values()} == {0}, ended["0"].output
    told = f"the worker on 127.0.0.1, process {again.pid}: {words}"
    assert lines(ended["0"], told) == 1 or lines(ended["0"], "rank 1 is taken: another server") == 1
    for rank in range(3):
        assert f"worker {rank} of 3 has joined" in ended[str(rank)].output


def test_a_second_process_with_rank_0_says_who_has_the_port(ranks: Ranks) -> None:
    ranks.start("0", 0)
    eventually(ranks.listens)
    ranks.start("0 again", 0)
    ranks.since = time.monotonic()
    (refused,) = ranks.ended("0 again").values()
    assert refused.code == 1 and len(refused.output.splitlines()) == 1
    for words in (f"can't listen at 127.0.0.1:{ranks.port}", "another process has rank 0"):
        assert words in refused.output, refused.output
    ranks.start("1", 1)
    assert {one.code for one in ranks.ended("0", "1").values()} == {0}


def test_a_stated_rank_is_kept_beside_processes_that_state_none(ranks: Ranks) -> None:
    # Those without a rank come first: they must not get what the others state.
    plan = {"scheduler": {}, "worker a": {}, "worker b": {}, "server a": {}}
    plan["server b"] = {"DMLC_SERVER_ID": "0"}
    plan["worker c"] = {"DMLC_WORKER_ID": "0"}
    for name, changes in plan.items():
        role = name.partition(" ")[0]
        ranks.keep(name, start_role(role, JOIN, ranks.port, 3, 2, **SUMS_ONLY, **changes))
    ended = ranks.ended()
    assert {one.code for one in ended.values()} == {0}
    said = {name: one.output for name, one in ended.items()}
    assert "worker 0 of 3 has joined" in said["worker c"]
    others = {
        said[name].strip()[-len("worker 0 of 3 has joined") :] for name in ("worker a", "worker b")
    }
    assert others == {"worker 1 of 3 has joined", "worker 2 of 3 has joined"}


def _connections(port: int) -> int:
    """How many processes have connected to a scheduler of this machine."""
    found = psutil.net_connections("tcp")
    return sum(one.laddr[1] == port and one.status == "ESTABLISHED" for one in found)


def test_two_jobs_of_one_launcher_at_one_port_stay_two(ranks: Ranks) -> None:
    first, second = ({"TORCHELASTIC_RUN_ID": run} for run in ("first", "second"))
    ranks.start("0", 0, **first)
    eventually(ranks.listens)
    ranks.start("second's 1", 1, **second)
    ranks.since = time.monotonic()
    (refused,) = ranks.ended("second's 1").values()
    words = "the scheduler at this address runs another job"
    assert refused.code == 1 and refused.seconds < PROMISED_S
    assert lines(refused, f"p3kv worker: {words}") == 1, refused.output
    ranks.start("1", 1, **first)
    ended = ranks.ended("0", "1")
    assert [one.code for one in ended.values()] == [0, 0], ended["0"].output
    assert words in ended["0"].output


# Accounts.

OTHER_UID = 65534
CAPABILITIES = "+dac_read_search"
"""So that it can read a Python that is in root's home. p3kv opens its own account's files only."""
AS_OTHER = [
    "setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups",
    f"--inh-caps={CAPABILITIES}", f"--ambient-caps={CAPABILITIES}", "--",
]  # fmt: skip
_NOT_ROOT = None if os.geteuid() == 0 else "only root can be another account, too"
_NO_SETPRIV = None if shutil.which("setpriv") else "'setpriv' is missing (package util-linux)"


@needs(_NOT_ROOT, _NO_SETPRIV)
def test_processes_of_two_accounts_do_not_become_one_job_and_hear_why(ranks: Ranks) -> None:
    ranks.start("0", 0)
    eventually(ranks.listens)
    ranks.start("other's 1", 1, account=AS_OTHER)
    ranks.since = time.monotonic()
    (refused,) = ranks.ended("other's 1").values()
    assert refused.code == 1 and refused.seconds < PROMISED_S
    words = f"127.0.0.1:{ranks.port} is of another account, root (uid 0), and this process is of "
    assert lines(refused, f"p3kv worker: what listens at {words}") == 1, refused.output
    ranks.start("1", 1)
    ended = ranks.ended("0", "1")
    assert [one.code for one in ended.values()] == [0, 0], ended["0"].output
    assert re.search(
        r"refused a connection \(number 1\): a process on .* is of another account, or .* only "
        r"processes of root \(uid 0\) can join it",
        ended["0"].output,
    ), ended["0"].output
    assert "worker 1 of 2 has joined" in ended["1"].output


@needs(_NOT_ROOT, _NO_SETPRIV)
def test_an_account_s_own_processes_become_a_job_and_another_s_whole_job_hears_who_is_there(
    ranks: Ranks,
) -> None:
    ranks.start("0", 0, account=AS_OTHER)
    eventually(ranks.listens)
    for rank in range(2):
        ranks.start(f"root's {rank}", rank)
    ranks.since = time.monotonic()
    refused = ranks.ended("root's 0", "root's 1")
    assert {one.code for one in refused.values()} == {1}
    assert "another program does (its account is" in refused["root's 0"].output
    assert f"uid {OTHER_UID}" in refused["root's 0"].output
    assert "of another account" in refused["root's 1"].output
    ranks.start("1", 1, account=AS_OTHER)
    ended = ranks.ended("0", "1")
    assert [one.code for one in ended.values()] == [0, 0], ended["0"].output
