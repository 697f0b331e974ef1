"""Keys of which only touched rows travel: numbers, bytes, and what breaks the protocol."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Dict, List, Optional, Set, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.codecs import VALUES, make_codec, part_of_rows
from p3kv.common.registry import Choice
from p3kv.errors import P3Error, ProtocolError
from p3kv.server.engine import ServerRows
from p3kv.server.engine.rows import RowsSum
from p3kv.wire.fields import Header, PullRowsHeader, RowsHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import ENCODED, INITIAL_ROUND, ONE_BYTE, TWO_BYTES, URGENT, Kind
from p3kv.wire.messages import DeclaredKey, SliceSizes
from p3kv.wire.rows import NUMBER, Rows, check_frame, packed, unpacked
from p3kv.worker.routes import RowsPull, RowsPush
from tests import in_memory
from tests.engines import end_round, engine_of, missing, push_rows
from tests.jobs import run_job

ROWS, COLUMNS = 12, 3
KNOWN = PullRowsHeader.NAMED | PullRowsHeader.KNOWN


def test_rows_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    job = run_job("rows.py", [tmp_path, 20], workers=3, servers=2)
    assert job.code == 0, job.output
    checks = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(3)]
    assert len(checks[0]) == 16 and checks == [checks[0]] * 3


def test_workers_need_no_memory_for_the_rows_that_they_do_not_pull() -> None:
    job = run_job("large_rows.py", workers=2, servers=2)
    assert job.code == 0 and job.output.count("little memory") == 2, job.output


def test_a_gradient_that_has_a_row_twice_ends_the_job_and_says_so() -> None:
    job = run_job("wrong_rows.py")
    assert job.code != 0
    last = job.output.splitlines()[-1]
    assert "failed first: a row_sparse array for key 'w' has a row twice" in last
    assert "Traceback" not in job.output


def rows(numbers: List[int], seed: int) -> Rows:
    """Whole numbers, whose sums are exact in any order."""
    elements = np.random.RandomState(seed).randint(-99, 99, (len(numbers), COLUMNS))
    return Rows(np.array(numbers, NUMBER), elements.astype(np.float32))


numbers = st.sets(st.integers(0, ROWS - 1)).map(sorted)


@given(st.lists(numbers, max_size=6))
def test_a_sum_has_the_rows_of_all_and_no_others(several: List[List[int]]) -> None:
    for ordered in (True, False):
        total = RowsSum(ROWS, COLUMNS, np.dtype(np.float32), ordered)
        expected = np.zeros((ROWS, COLUMNS))
        for rank, some in enumerate(several):
            one = rows(some, rank)
            expected[some] += one.elements
            total.add(rank, Rows(one.numbers[:2], one.elements[:2]))
            total.add(rank, Rows(one.numbers[2:], one.elements[2:]))
        found = [total.take(end) for end in (3, ROWS // 2, ROWS)]
        numbers = [number for part in found for number in part.numbers.tolist()]
        assert numbers == sorted(set().union(*several))
        np.testing.assert_array_equal(
            np.concatenate([part.elements for part in found]), expected[numbers]
        )


def key_of(workers: int, deterministic: bool = False, dtype: str = "float32") -> ServerRows:
    engine = engine_of(workers, deterministic=deterministic)
    declared = DeclaredKey(
        0, "w", (ROWS, COLUMNS), dtype, [(0, ROWS * COLUMNS)], layout="sparse_rows"
    )
    engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(ROWS * COLUMNS))
    key = engine.declare(declared).rows
    push_rows(key, 0, INITIAL_ROUND, 1, rows(list(range(ROWS)), 0), 0)
    end_round(key)
    return key


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_float16_is_summed_in_float32_and_rounded_once(deterministic: bool, updates: bool) -> None:
    key = key_of(3, deterministic, "float16")
    if updates:
        key.plan.optimizer = Adding()
    expected = np.zeros((ROWS, COLUMNS), np.float32) + (key.value if updates else 0)
    for rank, (some, value) in enumerate([([1, 4], 40_000), ([1, 5], 40_001), ([0, 1], -50_000)]):
        elements = np.full((2, COLUMNS), value, np.float16)  # the sum of two may be infinite
        expected[some] += elements
        push_rows(key, rank, 1, 1, Rows(np.array(some, NUMBER), elements), 1)
    end_round(key)
    assert key.value.dtype == np.float16 and np.isfinite(key.value).all()
    np.testing.assert_array_equal(key.value, expected.astype(np.float16))


class Adding(in_memory.Adding):
    """weight += rows, some of them at a time."""

    def __init__(self) -> None:
        self.ended = 0

    def updates_touched_rows(self, key: DeclaredKey, step: int) -> bool:
        return True

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        return False

    def update_rows(
        self, key: DeclaredKey, weight: np.ndarray, numbers: np.ndarray, rows: np.ndarray,
        step: int, ends_update: bool = True,
    ) -> None:  # fmt: skip
        weight[numbers] += rows
        self.ended += ends_update


@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_what_has_changed_since_a_round_makes_its_value_the_newest(
    data: st.DataObject, deterministic: bool, updates: bool
) -> None:
    workers, rounds = 3, 4
    key = key_of(workers, deterministic)
    optimizer = Adding()
    if updates:
        key.plan.optimizer = optimizer
    values = [key.value.copy()]
    for round_ in range(1, rounds + 1):
        expected = key.value.copy() if updates else np.zeros((ROWS, COLUMNS), np.float32)
        frames = []
        for rank in range(workers):
            some = rows(data.draw(numbers), 10 * round_ + rank)
            expected[some.numbers] += some.elements
            cut = data.draw(st.integers(0, len(some.numbers)))
            frames.append([slice(None, cut), slice(cut, None)])
            frames[-1] = [Rows(some.numbers[p], some.elements[p]) for p in frames[-1]]
        for rank in data.draw(st.permutations([*range(workers)] * 2)):
            assert key.rounds.next() is None
            assert all(rank in ranks for ranks in missing(key).values())
            push_rows(key, rank, round_, 2, frames[rank].pop(0), round_)
            if data.draw(st.booleans()) and missing(key):
                with pytest.MonkeyPatch.context() as patched:  # small parts, too
                    patched.setattr("p3kv.server.engine.rows._PART_BYTES", 0)
                    key.update_in_advance()
        end_round(key)
        assert optimizer.ended == (round_ if updates else 0)
        values.append(key.value.copy())
        np.testing.assert_array_equal(key.value, expected)
    for since, value in enumerate(values):
        changed = key.changed_since(since)
        value[changed] = key.value[changed]
        np.testing.assert_array_equal(value, key.value)


@pytest.mark.parametrize(
    ("rank", "round_", "frames", "of", "why"),
    [
        (1, 1, 1, [3, 3], "ascending"),
        (1, 1, 1, [4, 3], "ascending"),
        (1, 1, 1, [ROWS], "ascending order from 0 to 11"),
        (0, 1, 2, [3], "ascending order from 5"),
        (0, 1, 3, [6], "in 2 frames, or in 3"),
        (1, 1, 0, [6], "0 frames"),
        (2, 1, 1, [6], "twice"),
        (1, 0, 1, [6], "initial value"),
        (0, 0, 1, [6], "twice"),
        (1, 3, 1, [6], "only 2 rounds"),
    ],
)
def test_a_push_that_can_not_be_right_is_refused(
    rank: int, round_: int, frames: int, of: List[int], why: str
) -> None:
    key = key_of(3)
    push_rows(key, 0, 1, 2, rows([1, 4], 0), 1)
    push_rows(key, 2, 1, 1, rows([], 0), 1)
    with pytest.raises(ProtocolError, match=why):
        push_rows(key, rank, round_, frames, rows(of, 0), 1)


class RowsJob(in_memory.MemoryJob):
    """A job in memory with keys of rows."""

    def push(self, rank: int, key: in_memory.WorkerKey, round_: int, some: Rows) -> None:
        arrays = (some.numbers.astype(np.int64), some.elements)
        step = max(round_, 0)
        if key.own_rounds:
            step = self.workers[rank].steps.new_step(key.store)
        elif round_ > INITIAL_ROUND:
            self.workers[rank].steps.of_store(0).count_push(step)
        # Frames of the first key are large, and others as small as slices.
        push = RowsPush(key, round_, step, arrays, done)
        push.priority = -(round_ % 2)
        self.workers[rank].calls.append(push)

    def pull(self, rank: int, key: in_memory.WorkerKey, round_: int, value: np.ndarray,
             since: Dict[int, int]) -> None:  # fmt: skip
        def pulled(error: object) -> None:
            assert error is None
            since.update(pull.rounds)

        pull = RowsPull(key, round_, round_, 0, value, pulled)
        pull.priority, pull.rounds = -(round_ % 2), dict(since)
        self.workers[rank].calls.append(pull)


def done(error: object) -> None:
    assert error is None


def schedule(data: st.DataObject, job: RowsJob) -> None:
    while True:
        events = list(job.events(ahead=3))
        if not events:
            return
        function, *arguments = data.draw(st.sampled_from(events))
        function(*arguments)


def in_half(elements: np.ndarray) -> np.ndarray:
    return elements.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("codec", ["identity", "float16"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_whatever_happens_first_all_workers_have_the_rows_of_every_round(
    codec: str, data: st.DataObject
) -> None:
    workers, servers, rounds = 2, 2, 3
    job = RowsJob(workers, servers, 2 * COLUMNS, codec=codec)
    travelled = in_half if codec == "float16" else np.copy
    for server in job.servers:
        server.consumer.engine.state.optimizers.clear()
    try:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        job.push(0, keys[0], INITIAL_ROUND, rows(list(range(ROWS)), 99))
        values = [np.full((ROWS, COLUMNS), np.nan, np.float32) for _ in range(workers)]
        since: List[Dict[int, int]] = [{} for _ in range(workers)]
        for round_ in range(1, rounds + 1):
            expected = np.zeros((ROWS, COLUMNS), np.float32)
            for rank in range(workers):
                some = rows(data.draw(numbers), 10 * round_ + rank)
                some.elements[:] *= 2.0**-7 + 1  # more digits than half precision has
                expected[some.numbers] += travelled(some.elements)
                job.push(rank, keys[rank], round_, some)
                job.pull(rank, keys[rank], round_, values[rank], dict(since[rank]))
            schedule(data, job)
            for rank in range(workers):
                np.testing.assert_array_equal(values[rank], travelled(expected))
                since[rank] = dict.fromkeys(range(servers), round_)
        assert not any(server.most_open() for server in job.servers)
    finally:
        job.close()


class AddingRows(in_memory.Adding):
    """weight += rows, for rounds that are each worker's own."""

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        return False

    def update_rows(
        self, key: DeclaredKey, weight: np.ndarray, numbers: np.ndarray, rows: np.ndarray,
        step: Optional[int], ends_update: bool = True,
    ) -> None:  # fmt: skip
        assert step is not None  # worker 0's newest, or a step of its own
        weight[numbers] += rows


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_rows_that_each_worker_pushes_at_its_own_pace_are_all_counted_once(
    data: st.DataObject,
) -> None:
    workers, servers = 2, 2
    job = RowsJob(workers, servers, 2 * COLUMNS)
    try:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows", own=True)
        initial = rows(list(range(ROWS)), 99)
        expected = initial.elements.copy()
        values = [np.full((ROWS, COLUMNS), np.nan, np.float32) for _ in range(workers)]
        since: List[Dict[int, int]] = [{} for _ in range(workers)]
        pushed = [0] * workers
        for phase in range(3):
            for rank in range(workers):
                if phase == rank == 0:
                    job.push(0, keys[0], INITIAL_ROUND, initial)
                for _ in range(data.draw(st.integers(0, 3))):
                    pushed[rank] += 1
                    some = rows(data.draw(numbers), 10 * pushed[rank] + rank)
                    expected[some.numbers] += some.elements
                    job.push(rank, keys[rank], pushed[rank], some)
            schedule(data, job)
            if phase == 0:
                assert (sum(pushed) > 0) == any(
                    job.servers[0].consumer.engine.longest_waits(0, time.monotonic())
                )
                for server in job.servers:
                    server.set_optimizer(in_memory.OWN_STORE, AddingRows())
                schedule(data, job)
            for rank in range(workers):
                job.pull(rank, keys[rank], pushed[rank], values[rank], since[rank])
            schedule(data, job)
            for value in values:
                np.testing.assert_array_equal(value, expected)
    finally:
        job.close()


def test_a_push_that_does_not_come_is_known_and_one_that_can_not_come_ends_the_job() -> None:
    job = RowsJob(2, 1, 6)
    try:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        consumer = job.servers[0].consumer
        job.pull(1, keys[1], INITIAL_ROUND, np.zeros((ROWS, COLUMNS), np.float32), {})
        job.finish()
        [wait] = consumer.engine.longest_waits(0, time.monotonic())
        assert (wait.round, wait.missing, wait.arrived) == (INITIAL_ROUND, [0], [1])
        job.push(0, keys[0], INITIAL_ROUND, rows(list(range(ROWS)), 0))
        job.push(0, keys[0], 1, rows([2], 0))
        job.finish()
        [wait] = consumer.engine.longest_waits(0, time.monotonic())
        assert (wait.round, wait.missing, wait.arrived) == (1, [1], [0])
        assert "key 'w'" in wait.message(1, 2).called
        job.workers[1].data_plane.tell(Header(Kind.BYE, 1))
        while not job.servers[0].failures:
            function, *arguments = next(job.events())
            function(*arguments)
        [failure] = job.servers[0].failures
        assert failure.rank == 1 and "went on to round 1 of key 'w'" in failure.reason
    finally:
        job.close()


Wrong = Tuple[Kind, dict, int, str]
PUSH = {"frames": 1, "round": 1}
WRONG_FROM_WORKERS: List[Wrong] = [
    (Kind.PUSH_ROWS, {**PUSH, "rows": 1}, 17, "17 bytes for 1 rows"),
    (Kind.PUSH_ROWS, PUSH, 12, "12 bytes for 0 rows"),
    (Kind.PUSH_ROWS, {**PUSH, "rows": 13}, 13 * 12, "13 rows from 0 on, of 12"),
    (Kind.PUSH_ROWS, {**PUSH, "rows": 8, "first": 5}, 8 * 12, "8 rows from 5 on, of 12"),
    (Kind.PUSH_ROWS, {**PUSH, "rows": 2, "flags": TWO_BYTES}, 2 * 12 + 1, "25 bytes for 2 rows"),
    (Kind.PUSH_ROWS, {**PUSH, "rows": 2, "flags": ONE_BYTE}, 2 * 12 + 1, "not in ascending"),
    (Kind.PUSH_ROWS, {"frames": 1, "round": 9}, 0, "only 2 rounds"),
    (Kind.PUSH_ROWS, {**PUSH, "key": 7}, 0, "key 7, unknown here"),
    (Kind.PUSH, {"round": 1}, 0, "speaks of slices of key 'w'"),
    (Kind.PULL, {}, 0, "speaks of slices of key 'w'"),
    (Kind.PULL_ROWS, {}, 8, "8 bytes to ask"),
    (Kind.PULL_ROWS, {"flags": PullRowsHeader.NAMED}, 4 * 13, "52 bytes to ask"),
    (Kind.PULL_ROWS, {"flags": KNOWN}, 8 * 13, "104 bytes to ask"),
    (Kind.PULL_ROWS, {"flags": KNOWN}, 4 * 3, "12 bytes to ask"),
    (Kind.PUSH_ROWS, {**PUSH, "rows": 1, "flags": ENCODED}, 6, "encoded in 0 at most"),
]
ENCODED_PUSH = {**PUSH, "flags": ENCODED}
WRONG_ENCODED: List[Wrong] = [
    (Kind.PUSH_ROWS, {**ENCODED_PUSH, "round": 0, "rows": 1}, 6, "encoded in 0 at most"),
    (Kind.PUSH_ROWS, {**ENCODED_PUSH, "rows": 12}, 12 * 6 + 1, "encoded in 72 at most"),
    (Kind.PUSH_ROWS, {**ENCODED_PUSH, "rows": 2}, 8, r"8 bytes for \d+ elements of float16"),
    (
        Kind.PUSH_ROWS, {**ENCODED_PUSH, "rows": 3, "flags": ENCODED | ONE_BYTE}, 1,
        "1 bytes for 3 rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "kind", "fields", "payload_bytes", "why"),
    [
        *(("identity", *wrong) for wrong in WRONG_FROM_WORKERS),
        *(("float16", *wrong) for wrong in WRONG_ENCODED),
    ],
)
def test_a_server_refuses_frames_of_rows_that_can_not_be_right(
    codec: str, kind: Kind, fields: dict, payload_bytes: int, why: str
) -> None:
    job = RowsJob(1, 1, 6, codec=codec)
    try:
        job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        header, payload = kind.header(kind, 0, **fields), memoryview(bytes(payload_bytes))
        job.workers[0].servers[0].writer.push(Frame(URGENT, header, payload))
        with pytest.raises(P3Error, match=why):
            job.finish()
    finally:
        job.close()


@given(st.sets(st.integers(0, 70_000) | st.integers(0, 300), max_size=20), st.booleans())
def test_numbers_travel_in_as_few_bytes_as_their_distances_need(
    several: Set[int], encodes: bool
) -> None:
    some, dtype = rows(sorted(several), 0), np.dtype(np.float32)
    numbers = packed(some.numbers)
    payload = memoryview(b"".join(some.in_place(numbers.gaps)))
    as_sent, flags = some.elements, numbers.flags
    codec = make_codec(Choice("float16"), VALUES, 99 * COLUMNS, dtype)
    if encodes:
        most = codec.most_bytes(as_sent.size)
        payload = some.encoded(numbers.gaps, codec.encoder(VALUES), part_of_rows(1), most)
        as_sent, flags = as_sent.astype(np.float16), flags | ENCODED
    header = RowsHeader(
        Kind.ROWS, 0, flags, len(payload), round=1, first=numbers.first, rows=numbers.rows
    )
    most_bytes = codec.most_bytes(as_sent.size) if encodes else -1
    check_frame(header, 70_001, 4 * COLUMNS, most_bytes)
    found = unpacked(header, payload, dtype, COLUMNS, codec.decoder(VALUES), part_of_rows(1))
    np.testing.assert_array_equal(found.numbers, some.numbers)
    np.testing.assert_array_equal(found.elements, as_sent)
    most = max(np.diff(sorted(several)), default=1)
    each = 0 if most == 1 else 1 if most < 256 else 2 if most < 65536 else 4
    assert len(payload) == as_sent.nbytes + each * max(0, len(several) - 1)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([{"rows": 3}], "3 rows from 0 on, of 2"),
        ([{"rows": 1}], "1 rows of key 'w' less than were asked for"),
        ([{"rows": 2, "flags": ONE_BYTE}], "that were named to it"),
        ([{"rows": 1, "frames": 2}, {"rows": 1, "frames": 2}], "not in ascending order"),
        ([{"rows": 1, "first": 1, "frames": 2}, {"rows": 1, "frames": 2}], "not in ascending"),
    ],
)
def test_a_worker_refuses_rows_that_are_not_those_that_it_names(
    frames: List[Dict[str, int]], why: str
) -> None:
    job = RowsJob(2, 1, 6)
    try:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        job.push(0, keys[0], INITIAL_ROUND, rows(list(range(ROWS)), 0))
        job.push(0, keys[0], 1, rows([2], 0))
        named = np.array([2, 5])
        elements = np.zeros((2, COLUMNS), np.float32)
        pull = RowsPull(keys[0], 1, 1, 0, elements, done)
        pull.named = named
        job.workers[0].calls.append(pull)
        job.finish()
        for one in frames:
            size = one["rows"] * COLUMNS * 4 + bool(one.get("flags"))
            header = RowsHeader(Kind.ROWS, 0, **{"request": pull.request, "frames": 1, **one})
            frame = Frame(URGENT, header, memoryview(bytes(size)))
            job.servers[0].connections[0].writer.push(frame)
        with pytest.raises(P3Error, match=why):
            job.finish()
    finally:
        job.close()


def test_a_worker_refuses_rows_that_nobody_waits_for() -> None:
    job = RowsJob(1, 1, 6)
    try:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        job.push(0, keys[0], INITIAL_ROUND, rows(list(range(ROWS)), 0))
        job.finish()
        header = RowsHeader(Kind.ROWS, 0, request=3, frames=1)
        job.servers[0].connections[0].writer.push(Frame(URGENT, header))
        with pytest.raises(P3Error, match="nobody waits for"):
            job.finish()
    finally:
        job.close()


def test_rows_asked_for_when_worker_0_has_left_without_giving_any_end_the_job() -> None:
    """And not only where the request came before worker 0 left."""
    job = RowsJob(2, 1, 6)
    try:
        keys = job.declare("w", ROWS, COLUMNS, layout="touched_rows")
        job.workers[0].leave()
        job.finish()
        assert job.servers[0].failures == []
        job.pull(1, keys[1], INITIAL_ROUND, np.zeros((ROWS, COLUMNS), np.float32), {})
        job.finish()
        [failure] = job.servers[0].failures
        assert failure.rank == 0
        assert "key 'w' has no initial value for worker 1" in failure.reason
    finally:
        job.close()
