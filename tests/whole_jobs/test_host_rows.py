"""Workers of one host send the sum of their rows, and get rows that several want once."""

from __future__ import annotations

import re
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Dict, List, Optional, Sequence, Union

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p3kv.common.finite import NotFinite
from p3kv.common.registry import Choice
from p3kv.errors import ProtocolError
from p3kv.wire.fields import PullRowsHeader, PushRowsHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import CARRIES, IN_HOST_SUM, INITIAL_ROUND, NO_GRADIENT, Kind
from p3kv.wire.messages import CodecChoices, SliceSizes
from p3kv.wire.rows import NUMBER, Rows, summed, union
from p3kv.worker.routes import RowsPull, RowsPush
from p3kv.worker.transfers import WorkerKey
from tests.consistency.test_schedules import Moods
from tests.frontends.test_rows import Adding, numbers
from tests.frontends.test_torch import job as torch_job
from tests.handling import take
from tests.in_memory import MemoryJob, Worker
from tests.torch_environment import NEEDS_TORCH
from tests.whole_jobs.test_host_sums import ELSEWHERE, run_on_hosts

ROWS, COLUMNS = 12, 3
STEPS = 5
START = Rows(np.arange(ROWS, dtype=NUMBER), np.ones((ROWS, COLUMNS), np.float32))
"""The initial value."""


class Script:
    """One worker's pushes and pulls of a key of rows; what it has pulled is checked."""

    def __init__(self, worker: Worker, key: WorkerKey, expected: Sequence[np.ndarray]) -> None:
        self._worker = worker
        self._key = key
        self._expected = expected
        self._value = np.full((ROWS, COLUMNS), np.nan, np.float32)
        self._since: Dict[int, int] = {}
        self.pulled = 0

    def push(self, round_: int, some: Optional[Rows]) -> None:
        """None: without a gradient."""
        arrays = None if some is None else (some.numbers.astype(np.int64), some.elements)
        if round_ > INITIAL_ROUND:
            self._worker.steps.of_store(0).count_push(round_)
        push = RowsPush(self._key, round_, round_, arrays, self._done)
        push.after_pulls, push.changes = self._key.pulls, Future() if some is None else None
        self._call(push)

    def pull(self, round_: int, named: Optional[List[int]]) -> None:
        """None: all rows that have changed since the last time."""
        value = self._value
        if named is not None:
            value = np.full((len(named), COLUMNS), np.nan, np.float32)

        def pulled(error: Optional[BaseException]) -> None:
            self._done(error)
            if named is None:
                self._since = pull.rounds
            wanted = range(ROWS) if named is None else named
            first = 0
            for server, length in self._key.runs:
                last = first + length // COLUMNS
                rows = [row for row in wanted if first <= row < last]
                first = last
                if rows:
                    of_round = pull.rounds[server]
                    assert of_round >= round_
                    places = rows if named is None else [named.index(row) for row in rows]
                    np.testing.assert_array_equal(value[places], self._expected[of_round][rows])
            self.pulled += 1

        since = None if named is not None else self._since
        array = None if named is None else np.array(named, np.int64)
        pull = RowsPull(self._key, round_, round_, self._key.next_pull(), value, pulled)
        pull.named, pull.rounds = array, dict(since or {})
        self._call(pull)

    def _call(self, transfer: Union[RowsPush, RowsPull]) -> None:
        self._worker.under_way += 1
        self._worker.calls.append(transfer)

    def _done(self, error: Optional[BaseException]) -> None:
        self._worker.under_way -= 1
        if error is not None:
            self._worker.failures.append(error)


def added(several: Sequence[Rows]) -> Rows:
    """The sum of rows in this order, row by row."""
    total: Dict[int, np.ndarray] = {}
    for one in several:
        for row, elements in zip(one.numbers.tolist(), one.elements):
            total[row] = total[row] + elements if row in total else elements
    rows = sorted(total)
    elements = np.array([total[row] for row in rows], np.float32).reshape(-1, COLUMNS)
    return Rows(np.array(rows, NUMBER), elements)


@example(188760, [1, 5, 5], 1, 3, "changed", False)  # the carrier left before it was asked
@given(
    st.integers(0, 2**32),
    # How many steps each worker makes.
    st.lists(st.integers(1, STEPS), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from(["changed", "named", "both", "none"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_sums_and_pulls_are_right_bit_for_bit_whatever_the_order_of_events(
    seed: int, steps: List[int], servers: int, per_host: int, pulls: str, deterministic: bool
) -> None:
    """While some workers lack a gradient, or rows, some pull and others do not, some leave, and
    slices change their size."""
    random = Random(seed)
    pushed: List[List[Optional[Rows]]] = [
        [gradient(random, deterministic) for _ in range(most + 1)] for most in steps
    ]
    expected = [START.elements]
    for round_ in range(1, max(steps) + 1):
        of_hosts = [
            added([one[round_] for one, most in members if most >= round_ and one[round_]])
            for first in range(0, len(steps), per_host)
            for members in [[*zip(pushed, steps)][first : first + per_host]]
        ]
        total = added(of_hosts)
        expected.append(expected[-1].copy())
        expected[-1][total.numbers] += total.elements
    job = MemoryJob(
        len(steps), servers, 9, optimizer=Adding, lets_leave=True, per_host=per_host,
        deterministic=deterministic,
    )  # fmt: skip
    with closing(job):
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        scripts = [Script(*both, expected) for both in zip(job.workers, keys)]
        scripts[0].push(INITIAL_ROUND, START)
        asked = 0
        for script, mine, most in zip(scripts, pushed, steps):
            for round_ in range(1, most + 1):
                script.push(round_, mine[round_])
                for _ in range(0 if pulls == "none" else random.choice([0, 1, 1, 1, 2])):
                    named = pulls == "named" or (pulls == "both" and random.random() < 0.5)
                    script.pull(round_, some_rows(random) or [3] if named else None)
                    asked += 1
        sizes, moods = [3, 30, 12], Moods(random)
        while events := [
            *job.events(3), *((one.leave,) for one in job.workers if one.may_leave)
        ]:  # fmt: skip
            if sizes and not job.workers[0].left and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        assert sum(script.pulled for script in scripts) == asked
        for one in job.workers:
            assert one.left and not one.failures
            sums = one.data_plane.host_sums
            assert not sums.needed
            # One that has left may have been told of parts of sums that another sends then.
            assert not any(one.part for one in sums._carried._sums.values())
            assert not sums._pulls.passes_on
        assert not any(server.failures or server.most_open() for server in job.servers)
        np.testing.assert_array_equal(kept(job, keys[0]), expected[-1])


def some_rows(random: Random) -> List[int]:
    return sorted(random.sample(range(ROWS), random.choice([0, 1, 4, 9])))


def gradient(random: Random, ordered: bool) -> Optional[Rows]:
    """Some rows whose sums depend on their order, if it is `ordered`; sometimes none, or no
    gradient."""
    if random.random() < 0.2:
        return None
    some = some_rows(random)
    elements = np.random.RandomState(random.randrange(2**32)).standard_normal((len(some), COLUMNS))
    elements = elements if ordered else np.rint(9 * elements)
    return Rows(np.array(some, NUMBER), elements.astype(np.float32))


def kept(job: MemoryJob, key: WorkerKey) -> np.ndarray:
    return np.concatenate(
        [job.servers[server].consumer.engine.keys[key.key_id].rows.value for server, _ in key.runs]
    )


@given(st.lists(numbers, min_size=1, max_size=4), st.integers(1, ROWS))
def test_a_sum_of_rows_is_the_same_whatever_is_summed_at_a_time(
    several: List[List[int]], at_a_time: int
) -> None:
    parts = [
        Rows(
            np.array(some, NUMBER),
            np.random.RandomState(seed).standard_normal((len(some), COLUMNS)).astype(np.float32),
        )
        for seed, some in enumerate(several)
    ]
    expected, all_numbers = added(parts), union([one.numbers for one in parts])
    np.testing.assert_array_equal(all_numbers, expected.numbers)
    for start in range(0, len(all_numbers), at_a_time):
        some = slice(start, start + at_a_time)
        total = summed(all_numbers[some], parts, np.dtype(np.float32))
        np.testing.assert_array_equal(total.elements, expected.elements[some])


@pytest.mark.parametrize(
    ("dtype", "codec", "gradients", "total", "item_bytes"),
    [
        # The sum of the first two is infinite in half precision.
        ("float16", "identity", [40_000, 40_000, -48_000], 32_000, 4),
        ("bfloat16", "identity", [256, 1, 1], 258, 4),
        # Each of them is 1 in half precision.
        ("float32", "float16", [1 + 0.75 * 2**-11] * 3, 3 + 2**-9, 2),
    ],
)
def test_the_sum_of_a_host_is_rounded_once_and_travels_once(
    dtype: str, codec: str, gradients: Sequence[float], total: float, item_bytes: int
) -> None:
    rows, columns, count = 300, 20, 200
    with closing(
        MemoryJob(3, 1, 400, per_host=3, dtype=dtype, codecs=CodecChoices(Choice(codec)))
    ) as job:
        job.servers[0].consumer.engine.state.optimizers.clear()  # the sum is the value
        keys = job.declare("w", rows, columns, layout="touched_rows")
        scripts = [Script(*both, []) for both in zip(job.workers, keys)]
        every = np.arange(rows, dtype=NUMBER)
        scripts[0].push(INITIAL_ROUND, Rows(every, np.zeros((rows, columns), dtype)))
        job.finish()
        before = sum(worker.data_plane.counts["bytes_sent"] for worker in job.workers)
        for script, one in zip(scripts, gradients):
            script.push(1, Rows(every[:count], np.full((count, columns), one, dtype)))
        job.finish()
        sent = sum(worker.data_plane.counts["bytes_sent"] for worker in job.workers) - before
        assert sent == count * columns * item_bytes  # rows that follow each other have no numbers
        value = job.servers[0].consumer.engine.keys[0].rows.value
        np.testing.assert_array_equal(value[:count], np.full((count, columns), total, dtype))
        assert not value[count:].any()


def test_a_worker_finds_what_is_not_finite_before_it_is_summed() -> None:
    with closing(MemoryJob(2, 1, 9, optimizer=Adding, per_host=2, check_finite=True)) as job:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        scripts = [Script(*both, []) for both in zip(job.workers, keys)]
        scripts[0].push(INITIAL_ROUND, START)
        job.finish()
        for script, bad in zip(scripts, (1.0, np.nan)):
            script.push(1, Rows(np.array([5], NUMBER), np.full((1, COLUMNS), bad, np.float32)))
        with pytest.raises(NotFinite) as found:
            job.finish()
        assert found.value.rank == 1


@pytest.mark.parametrize("on", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_row_leaves_a_host_once_and_comes_once(on: int) -> None:
    result = run_on_hosts(3, "host_rows.py", workers=6, P3KV_LOCAL_AGGREGATION=on)
    assert result.code == 0, result.output
    sent, received = 0, 0
    for rank in range(3):
        [line] = re.findall(r"sent (\d+) received (\d+) in (\d+)", result.said_by(f"worker {rank}"))
        sent += int(line[0]) / int(line[2])
        received += int(line[1]) / int(line[2])
    # All workers touch 400 rows, and each 100 more; of one key the host pulls what it touches, of
    # the other what all have changed. A row has 16 elements, and a distance of one byte.
    row_bytes = 16 * 4 + 1
    pushed, named, changed = (700, 700, 1000) if on else (3 * 500, 3 * 500, 3 * 1000)
    assert sent == pytest.approx(2 * pushed * row_bytes + 4 * named, rel=0.01)
    # Who pulls when the round has ended does so alone, the more the busier the machine is.
    assert 0.99 < received / ((named + changed) * row_bytes) < 1.5


def test_rows_of_hosts_have_the_numbers_of_one_process_bit_for_bit(tmp_path: Path) -> None:
    result = run_on_hosts(2, "rows.py", tmp_path, 20, 2, workers=3)
    assert result.code == 0, result.output
    checks = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(3)]
    assert len(checks[0]) == 16 and checks == [checks[0]] * 3


@NEEDS_TORCH
def test_weights_and_states_of_torch_are_those_of_one_process(tmp_path: Path) -> None:
    """With tables that some workers or none use, gradients without rows, and dense layers."""
    result = torch_job(
        "on_hosts.py", 2, "torch_rows.py", "Adagrad", tmp_path / "w.pt", workers=4,
        DMLC_NODE_HOST=ELSEWHERE, P3KV_SLICE_SIZE=100,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("right with Adagrad") == 4, result.output


@pytest.mark.long  # rows are summed likewise
@NEEDS_TORCH
def test_what_torch_users_do_with_rows_works_where_hosts_sum_them() -> None:
    """Clipping by the norm of dense gradients and rows, half precision, tables that one worker or
    all have frozen."""
    result = torch_job("on_hosts.py", 2, "torch_rows_uses.py", "on_hosts", DMLC_NODE_HOST=ELSEWHERE)
    assert result.code == 0, result.output
    assert result.output.count("clipped") == result.output.count("refused") == 2, result.output


@pytest.mark.long  # rows are summed likewise
@NEEDS_TORCH
def test_tables_that_servers_hold_are_those_of_torch_where_hosts_sum_rows() -> None:
    result = torch_job(
        "on_hosts.py", 2, "torch_table.py", "SparseAdam", workers=3, DMLC_NODE_HOST=ELSEWHERE,
        P3KV_SLICE_SIZE=100, P3KV_DETERMINISTIC=1,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("right with SparseAdam") == 3, result.output


def test_a_neighbour_that_is_killed_is_named_by_the_others() -> None:
    result = run_on_hosts(2, "host_rows.py", "killed", workers=4)
    assert result.code == 137, result.output
    for rank in (0, 2, 3):
        said = result.said_by(f"worker {rank}")
        assert re.search(r"worker 1 \(round \d\): its process was killed by SIGKILL", said)


@pytest.mark.parametrize(
    ("flags", "workers", "round_", "payload", "refusal"),
    [
        (IN_HOST_SUM, 0, 1, bytes(16), "16 bytes in 1 frames"),
        (IN_HOST_SUM, 2, 1, b"", "with the sum of 2 workers"),
        (CARRIES, 0, 1, bytes(16), "with the sum of 0 workers"),
        (CARRIES, 2, 1, bytes(12), "has announced no sum"),
        (CARRIES, 2, 9, bytes(12), "only 2 rounds"),
        (CARRIES | NO_GRADIENT, 2, 1, bytes(12), "without a gradient"),
        (CARRIES | IN_HOST_SUM, 1, 1, bytes(15), "15 bytes"),
    ],
)
def test_a_server_refuses_sums_of_rows_that_can_t_be_right(
    flags: int, workers: int, round_: int, payload: bytes, refusal: str
) -> None:
    with closing(MemoryJob(2, 1, 9)) as job:
        [key, _] = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        Script(job.workers[0], key, []).push(INITIAL_ROUND, START)
        job.finish()
        header = PushRowsHeader(
            Kind.PUSH_ROWS, 0, flags, key=key.key_id, round=round_, step=round_, frames=1,
            workers=workers, rows=len(payload) // 12,
        )  # fmt: skip
        job.workers[0].servers[0].writer.push(Frame(0, header, memoryview(payload)))
        with pytest.raises(Exception, match=refusal):
            job.finish()


def test_what_a_neighbour_may_not_say_of_rows() -> None:
    with closing(MemoryJob(2, 1, 9, optimizer=Adding, per_host=2, deterministic=True)) as job:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        scripts = [Script(*both, []) for both in zip(job.workers, keys)]
        some = Rows(np.array([2, 3], NUMBER), np.ones((2, COLUMNS), np.float32))
        scripts[0].push(
            INITIAL_ROUND, Rows(np.arange(ROWS, dtype=NUMBER), np.ones((ROWS, COLUMNS), np.float32))
        )
        for script in scripts:
            script.push(1, some)
        job.finish()
        for script in scripts:
            script.push(2, some)
        scripts[1].pull(2, [3])
        for worker in job.workers:
            while worker.calls:
                worker.begin()
        sums, other = (worker.data_plane.host_sums for worker in job.workers)

        def hear(kind: Kind, payload: bytes = b"", to: object = sums, **fields: int) -> None:
            header = kind.header(
                kind, 1 if to is sums else 0, payload_bytes=len(payload), key=0, round=2, **fields
            )
            take(to, job.workers[header.rank ^ 1].neighbours[header.rank], header, payload)

        while sums._queue.heap:
            sums.work()
        with pytest.raises(ProtocolError, match="shares 13 rows"):
            hear(Kind.SUMMAND, rows=13)
        with pytest.raises(ProtocolError, match="with 3 bytes"):
            hear(Kind.PULL_ROWS, b"123")
        for fields in ({"request": 7}, {"slice": 9}):
            with pytest.raises(ProtocolError, match="which nobody waits for"):
                hear(Kind.ROWS, to=other, frames=1, **fields)
        push = next(job.workers[0].exchange.in_flight())
        push.key.channel.ended = push.round
        sums._pulls.round_ended(push)
        named = {"flags": PullRowsHeader.NAMED}
        with pytest.raises(ProtocolError, match="not in ascending order"):
            hear(Kind.PULL_ROWS, np.array([3, 3], NUMBER).tobytes(), **named)
        with pytest.raises(ProtocolError, match="rows of run 1"):
            hear(Kind.PULL_ROWS, np.array([3], NUMBER).tobytes(), slice=1, **named)
