"""Workers of one host send one sum and get one value, and nothing else is different."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Callable, List, Sequence, Tuple, Type

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p3kv.common.registry import Choice
from p3kv.consistency import BulkSynchronous
from p3kv.errors import ConfigError, P3Error, ProtocolError
from p3kv.server.optimizer import Optimizer
from p3kv.wire.fields import PushHeader, UpdatedHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    IN_HOST_SUM,
    INITIAL_ROUND,
    WANTS_RESULT,
    Kind,
)
from p3kv.wire.messages import CodecChoices, SharedMemory, SliceSizes
from p3kv.worker import neighbours
from p3kv.worker.job import JobMember
from p3kv.worker.neighbours import Neighbours
from p3kv.worker.routes.host_memory import OwnMemory, TheirMemory
from tests.adding import Adding, AddingWhole
from tests.consistency.test_schedules import (
    SELDOM,
    SIZE,
    STEPS,
    Moods,
    Script,
    Training,
    gradient,
    values,
)
from tests.handling import Nobody, take
from tests.in_memory import MemoryJob
from tests.jobs import DEADLINE_S, SCRIPTS, JobResult, end, held_port, results, run_job, start_role
from tests.whole_jobs.test_exactness import summed_in_rank_order

sys.path.insert(0, str(SCRIPTS))
import exact_model

ELSEWHERE = "127.0.0.9"
"""The servers' host; workers fill 127.0.0.1, 127.0.0.2 and so on."""


def run_on_hosts(
    per_host: int, script: str, *arguments: object, workers: int, servers: int = 2, **more: object
) -> JobResult:
    settings = {"DMLC_NODE_HOST": ELSEWHERE, **more}
    return run_job("on_hosts.py", [per_host, script, *arguments], workers, servers, **settings)


@given(
    st.integers(0, 2**32),
    st.integers(2, 5),
    st.integers(1, 2),
    st.integers(2, 3),
    st.sampled_from([Adding, AddingWhole]),
    st.booleans(),
    # Exact for the numbers here.
    st.sampled_from(["identity", "float16"]),
    st.sampled_from(["float32", "float16"]),
)
# A neighbour's value came before the server had said to the worker how large slices are now.
@example(0, 4, 1, 3, Adding, True, "identity", "float32")
@settings(max_examples=80, deadline=None)
def test_results_are_right_whatever_the_order_of_events(
    seed: int,
    workers: int,
    servers: int,
    per_host: int,
    optimizer: Type[Optimizer],
    clips: bool,
    codec: str,
    dtype: str,
) -> None:
    """While some workers want results and others do not, and sizes change."""
    random = Random(seed)
    expected = values(workers, STEPS, optimizer.whole_tensors)
    with closing(
        Training(workers, servers, BulkSynchronous, codec, optimizer, False, per_host, dtype)
    ) as job:
        scripts = [
            Script(job, worker, rank, random, BulkSynchronous(workers))
            for rank, worker in enumerate(job.workers)
        ]
        for script in scripts:
            script.train(expected, clips)
        sizes = [SIZE // 5, SIZE, SIZE // 3, SIZE // 2]
        ahead, moods = random.choice([1, 3]), Moods(random)
        while events := list(job.events(ahead)):
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        for worker in job.workers:
            assert worker.under_way == 0
            assert not worker.failures
            sums = worker.data_plane.host_sums
            assert not sums.needed and not sums._carried._sums
        for name, rounds in (("often", STEPS), ("seldom", STEPS // SELDOM)):
            np.testing.assert_array_equal(job.kept(job.keys[name][0]), expected[rounds])
        for script in scripts:
            for check in script.checks:
                check()
        assert not any(server.most_open() for server in job.servers)


@pytest.mark.parametrize(
    ("dtype", "codec", "gradients", "total", "sent_bytes"),
    [
        # The sum of the first two is infinite in half precision.
        ("float16", "identity", [40_000, 40_000, -48_000], 32_000, 4),
        # The sum of the first two is 256 in bfloat16.
        ("bfloat16", "identity", [256, 1, 1], 258, 4),
        # Each of them is 1 in half precision.
        ("float32", "float16", [1 + 0.75 * 2**-11] * 3, 3 + 2**-9, 2),
        # Of each of them nothing would be sent.
        ("float32", "2bit", [0.25, 0.375, -0.125], 0.5, 1 / 4),
        ("float16", "float16", [40_000, 40_000, -48_000], 32_000, 6),
    ],
)
def test_the_sum_of_a_host_is_rounded_once_and_travels_once(
    dtype: str, codec: str, gradients: Sequence[float], total: float, sent_bytes: float
) -> None:
    choices = CodecChoices(Choice(codec))
    with closing(MemoryJob(3, 1, SIZE // 2, per_host=3, dtype=dtype, codecs=choices)) as job:
        keys = job.declare("w", SIZE)
        zeros, targets = np.zeros(SIZE, dtype), [np.empty(SIZE, dtype) for _ in keys]
        job.workers[0].call(keys[0], INITIAL_ROUND, zeros, None)
        job.finish()
        before = sum(worker.data_plane.counts["bytes_sent"] for worker in job.workers)
        for worker, key, gradient_, target in zip(job.workers, keys, gradients, targets):
            worker.call(key, 1, np.full(SIZE, gradient_, dtype), target)
        job.finish()
        sent = sum(worker.data_plane.counts["bytes_sent"] for worker in job.workers) - before
        for target in targets:
            np.testing.assert_array_equal(target, np.full(SIZE, total, dtype))
        assert sent / SIZE == pytest.approx(sent_bytes, rel=0.01)


@given(
    st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 2), st.integers(2, 3), st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_what_a_codec_keeps_back_of_a_host_s_sum_is_with_one_worker_for_ever(
    seed: int, workers: int, servers: int, per_host: int, deterministic: bool
) -> None:
    """Whatever the size of slices is, and while some workers have no gradient."""
    random = Random(seed)
    hosts = [range(first, min(first + per_host, workers)) for first in range(0, workers, per_host)]
    kept_back = [np.zeros(SIZE, np.float32) for _ in hosts]
    fresh = [[random.random() < 0.7 for _ in range(workers)] for _ in range(STEPS + 1)]
    expected, pushed = [np.zeros(SIZE, np.float32)], np.zeros(SIZE, np.float32)
    for round_ in range(1, STEPS + 1):
        value = expected[-1].copy()
        for host, residual in zip(hosts, kept_back):
            total = [fractions(rank, round_) for rank in host if fresh[round_][rank]]
            if total:
                residual += np.sum(total, axis=0)
                sent = 0.5 * ((residual >= 0.5).astype(np.float32) - (residual <= -0.5))
                residual -= sent
                value += sent
                pushed += np.sum(total, axis=0)
        expected.append(value)
    targets: List[Tuple[int, np.ndarray]] = []
    job = MemoryJob(
        workers, servers, SIZE // 2, per_host=per_host, deterministic=deterministic,
        codecs=CodecChoices(Choice("2bit")),
    )  # fmt: skip
    with closing(job):
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, expected[0].copy(), None)
        for rank, worker in enumerate(job.workers):
            for round_ in range(1, STEPS + 1):
                target = np.full(SIZE, np.nan, np.float32) if random.random() < 0.5 else None
                worker.call(keys[rank], round_, fractions(rank, round_), target)
                if target is not None:
                    targets.append((round_, target))
                if not fresh[round_][rank]:
                    worker.calls[-1].changes = Future()
                    worker.calls[-1].has_gradient = False
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        while events := list(job.events(3)):
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        for round_, target in targets:
            np.testing.assert_array_equal(target, expected[round_])
        kept = job.kept(keys[0])
        np.testing.assert_array_equal(kept, expected[-1])
        residuals = [key.encoder._residual for key in keys]
        for host, residual in zip(hosts, kept_back):
            np.testing.assert_array_equal(sum(residuals[rank] for rank in host), residual)
            carriers = sum((residuals[rank] != 0).astype(int) for rank in host)
            assert carriers.max() <= 1
        np.testing.assert_array_equal(kept + sum(residuals), pushed)


def fractions(rank: int, round: int) -> np.ndarray:
    """A gradient whose sums are exact, though 2bit sends only a part of it."""
    whole = np.random.RandomState([rank, round]).randint(-400, 400, SIZE)
    return (whole / 1024).astype(np.float32)


@pytest.mark.parametrize(
    ("workers", "per_host"),
    [(3, 2), *(pytest.param(*shape, marks=pytest.mark.long) for shape in ((4, 2), (4, 4)))],
)
def test_sums_are_by_host_and_then_by_rank_bit_for_bit_in_deterministic_mode(
    tmp_path: Path, workers: int, per_host: int
) -> None:
    trainings = ("sgd-servers", "adam-workers")
    result = run_on_hosts(
        per_host, "exact.py", tmp_path, *trainings, workers=workers, P3KV_DETERMINISTIC=1,
        P3KV_SLICE_SIZE=exact_model.SLICE_SIZE,
    )  # fmt: skip
    assert result.code == 0, result.output
    for training in trainings:
        weights = exact_model.saved(tmp_path, training)
        exact_model.assert_trained_as_by_one_process(weights, training.partition("-")[0])
        expected = summed_in_rank_order(training.partition("-")[0], workers, per_host)
        for key, value in expected.items():
            np.testing.assert_array_equal(weights[key], value, err_msg=key)


@pytest.mark.parametrize(("on", "share"), [(1, 1 / 3), pytest.param(0, 1, marks=pytest.mark.long)])
def test_a_host_sends_and_receives_each_byte_once(on: int, share: float) -> None:
    result = run_on_hosts(
        3, "neighbours.py", workers=6, P3KV_LOCAL_AGGREGATION=on, P3KV_SLICE_SIZE=5000
    )
    assert result.code == 0, result.output
    for rank in range(6):
        [line] = re.findall("sent .*$", result.said_by(f"worker {rank}"), re.M)
        sent, received, size = map(float, re.findall(r"[\d.]+", line))
        assert sent / size == pytest.approx(share, rel=0.2)
        assert received / size == pytest.approx(share, rel=0.2)


def test_a_neighbour_that_does_not_push_is_named_and_nobody_who_waits_for_it() -> None:
    result = run_on_hosts(2, "skips.py", "skips", workers=2, P3KV_STALL_TIMEOUT_S=8)
    assert result.code == 1, result.output
    assert "worker 1 has not pushed parameter 'net_dense0_weight' (key 1) in round 3" in (
        result.output
    )
    # Worker 1 goes on, so it comes to wait for worker 0; but never for the same parameter.
    assert not re.search("worker 0 has not pushed .*dense0_weight|workers 0, 1", result.output)


def test_a_neighbour_that_is_killed_is_named_by_the_others() -> None:
    result = run_on_hosts(2, "neighbours.py", "killed", workers=4)
    assert result.code == 137, result.output
    for rank in (0, 2, 3):
        said = result.said_by(f"worker {rank}")
        assert re.search(r"worker 1 \(round \d\): its process was killed by SIGKILL", said)
    assert "p3kv launch: worker 1" in result.output.splitlines()[-1]


def test_a_neighbour_whose_memory_is_private_is_told_in_a_line() -> None:
    result = run_on_hosts(2, "neighbours.py", "private", workers=2)
    assert result.code == 1, result.output
    assert "Set P3KV_LOCAL_AGGREGATION=0 on all workers" in result.output.splitlines()[-1]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ("fifo", "what it shares is no memory"),
        ("shrinks", "it shares memory that it may take away"),
    ],
)
def test_a_neighbour_that_shares_what_is_no_lasting_memory_is_named(shares: str, told: str) -> None:
    result = run_on_hosts(2, "neighbours.py", shares, workers=2, timeout_s=30.0)
    assert result.code == 1, result.output
    assert re.search(rf"worker 1 .*it broke the protocol: {told}", result.output), result.output
    assert "Traceback" not in result.output


def _fifo() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        return os.open(f"{folder}/fifo", os.O_RDONLY | os.O_NONBLOCK)


def _unsealed() -> int:
    memory = os.memfd_create("p3kv")
    os.ftruncate(memory, 100)
    return memory


def _file() -> int:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(100))
        file.flush()
        return os.dup(file.fileno())


def _device() -> int:
    return os.open("/dev/zero", os.O_RDONLY)


@pytest.mark.parametrize("made", [_fifo, _unsealed, _file, _device])
def test_only_memory_that_keeps_its_size_is_mapped(made: Callable[[], int]) -> None:
    descriptor = made()
    try:
        with pytest.raises(ProtocolError, match="memory"):
            TheirMemory().at(SharedMemory(os.getpid(), descriptor, 0, 100))
    finally:
        os.close(descriptor)


def test_shared_memory_can_t_be_shortened() -> None:
    own = OwnMemory()
    _, place = own.take(100)
    for size_bytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(place.descriptor, size_bytes)
    own.close()


def test_a_neighbour_that_accepts_nobody_is_no_reason_to_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, jobs = os.urandom(32), [JobMember() for _ in range(3)]
    silent, mine, again = (
        Neighbours(rank, [0, rank or 1], key, job) for rank, job in enumerate(jobs)
    )
    waiting = []
    jobs[1].failure = P3Error("the job's failure")

    try:
        with suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(silent._name(0))
        with pytest.raises(P3Error, match="the job's failure"):
            mine.connect(Nobody(), None)
        monkeypatch.setattr(neighbours, "_CONNECT_S", 0.5)
        with pytest.raises(P3Error, match="worker 0, on the same host, accepts nobody"):
            again.connect(Nobody(), None)
    finally:
        for one in waiting:
            one.close()
        for neighbour in (silent, mine, again):
            neighbour.close()
        for job in jobs:
            job.loop.close()


def test_what_a_neighbour_or_a_server_may_not_say_of_sums() -> None:
    with closing(Training(2, 1, per_host=2)) as job:
        key = job.keys["often"][0]
        job.workers[0].call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.finish()
        worker = job.workers[0]
        worker.call(key, 1, gradient(0, 1), np.zeros(SIZE, np.float32))
        job.finish()
        sums = worker.data_plane.host_sums
        carrier = sums._carriers.carrier
        carried = next(p for p in key.slices(job._slice_size) if carrier(key, p, 1) == 0)
        other = next(p for p in key.slices(job._slice_size) if carrier(key, p, 1) == 1)

        def hear(kind: Kind, index: int, round: int = 1) -> None:
            header = kind.header(kind, 1, key=key.key_id, slice=index, round=round)
            take(sums, worker.neighbours[1], header)

        with pytest.raises(ProtocolError, match="shares no memory"):
            hear(Kind.SUMMAND, carried.index)
        with pytest.raises(ProtocolError, match="twice"):
            for _ in range(2):
                hear(Kind.SUMMAND, other.index, round=2)
        with pytest.raises(ProtocolError, match="which another carries"):
            hear(Kind.VALUE, carried.index)
        for index, round_ in ((99, 1), (0, 5)):
            with pytest.raises(ProtocolError, match="for which nobody waits"):
                hear(Kind.VALUE, index, round_)
        update = UpdatedHeader(
            Kind.UPDATED, 0, payload_bytes=4 * other.length, key=key.key_id, slice=other.index,
            round=1, step=1,
        )  # fmt: skip
        with pytest.raises(ProtocolError, match="another worker of this host has asked"):
            take(worker.data_plane, worker.servers[0], update, bytes(update.payload_bytes))


@pytest.mark.parametrize(
    ("flags", "round_", "payload", "refusal"),
    [
        (IN_HOST_SUM, 1, b"1234", "besides those in its host's sum"),
        (IN_HOST_SUM, INITIAL_ROUND, b"", "with others, in round 0"),
        (CARRIES | WANTS_RESULT, 1, b"1234" * (SIZE // 2), "has announced no sum"),
        (CARRIES | IN_HOST_SUM, 1, b"1234", "4 bytes for"),
        (CARRIES | ENCODED, 1, b"1234" * (2 * SIZE), "encoded bytes"),
    ],
)
def test_a_server_refuses_sums_that_can_t_be_right(
    flags: int, round_: int, payload: bytes, refusal: str
) -> None:
    with closing(Training(2, 1)) as job:
        key, worker = job.keys["often"][0], job.workers[0]
        worker.call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.finish()
        header = PushHeader(Kind.PUSH, 0, flags, key=key.key_id, round=round_, step=round_)
        worker.servers[0].writer.push(Frame(0, header, memoryview(payload)))
        with pytest.raises(Exception, match=refusal):
            job.finish()


def test_memory_is_what_its_owner_writes_and_no_more() -> None:
    own, theirs = OwnMemory(), TheirMemory()
    small, place = own.take(100)
    large, elsewhere = own.take(100 << 20)
    again, beside = own.take(7)
    small[:], large[-5:], again[:] = 1, 2, 3
    assert (theirs.at(place) == 1).all()
    seen = theirs.at(elsewhere)
    assert len(seen) == 100 << 20
    assert (seen[-5:] == 2).all()
    assert not seen[:-5].any()
    assert (theirs.at(beside) == 3).all()
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    with pytest.raises(ProtocolError, match="it shares memory up to byte"):
        theirs.at(SharedMemory(os.getpid(), place.descriptor, 64 << 20, 1))
    own.close()
    assert (seen[-5:] == 2).all(), "what was opened stays"
    with pytest.raises(ConfigError, match="P3KV_LOCAL_AGGREGATION=0"):
        TheirMemory().at(place)


def test_without_a_launcher_a_neighbour_s_death_is_no_reset_connection() -> None:
    script = [sys.executable, str(SCRIPTS / "neighbours.py"), "killed"]
    roles = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    with held_port() as holder:
        port = holder.getsockname()[1]
        processes = {
            f"{role} {rank}": start_role(
                role, script, port, workers=2,
                DMLC_NODE_HOST="127.0.0.1" if role == "worker" else ELSEWHERE,
                **{f"DMLC_{role.upper()}_ID": rank},
            )
            for role, rank in roles
        }  # fmt: skip
        try:
            ended = results(processes, time.monotonic(), timeout_s=DEADLINE_S)
        finally:
            for process in processes.values():
                end(process)
    # Its neighbour knows of round 3, the scheduler of round 2; either may notice first.
    said = ended["worker 0"].output
    assert re.search(r"worker 1 \(round [23]\): its process ended", said), said
