"""Codecs by which a slice's largest elements travel: topk and dgc."""

from __future__ import annotations

import sys
from contextlib import closing
from itertools import accumulate
from random import Random
from typing import Dict, List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.codecs import DGC, GRADIENTS, VALUES, Decoder, Encoder, Part, TopK
from p3kv.codecs.some_elements import (
    largest,
    most_position_bytes,
    read_positions,
    share_of,
    written_positions,
)
from p3kv.common.registry import Choice
from p3kv.errors import ProtocolError
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import CodecChoices, SliceSizes
from tests.consistency.test_schedules import Moods
from tests.in_memory import MemoryJob
from tests.jobs import SCRIPTS, environment, run, run_job

FLOATS = st.sampled_from([np.dtype(np.float32), np.dtype(np.float64)])
SEEDS = st.integers(0, 2**32 - 1)


# Positions.


@given(st.integers(1, 3000), st.floats(0, 1), SEEDS)
def test_positions_are_read_as_they_were_written_in_the_least_bytes(
    length: int, share: float, seed: int
) -> None:
    random = np.random.RandomState(seed)
    where = np.flatnonzero(random.random_sample(length) < share)
    written = written_positions(where, length)
    found, items = read_positions(memoryview(bytes(2 * len(where)) + written), length, 2)
    np.testing.assert_array_equal(found, where)
    assert len(items) == 2 * len(where)
    assert len(written) <= most_position_bytes(length, len(where))


@pytest.mark.parametrize(
    ("length", "where", "size_bytes"),
    [
        (50_000, range(0, 50_000, 2), 6250),  # a bit for each element
        (50_000, range(99, 50_000, 100), 500),  # a byte for each of one in a hundred
        (200_000, range(999, 200_000, 1000), 400),  # two for each of one in a thousand
        (3_000_000, [2_999_999], 4),
        (50_000, [], 0),
    ],
)
def test_positions_take_what_they_should(length: int, where: List[int], size_bytes: int) -> None:
    end_bytes = len(written_positions(np.array([], np.int64), length))
    assert len(written_positions(np.array(where, np.int64), length)) == size_bytes + end_bytes


def end(form: int, count: int) -> bytes:
    return bytes([form]) + count.to_bytes(4, "little")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        end(0, 0),  # no bits
        b"\x00" + end(0, 1),  # fewer bits than positions
        b"\x01" + end(0, 1),  # the eighth of seven elements
        b"\x07" + end(1, 1),  # the same by a gap
        b"\x07" + end(2, 1),  # half a gap
        b"\xff" + end(1, 0),  # a gap that does not end
        b"\x00\xff" + end(1, 1),
        b"\x01\x00\x00\x00\x01\x00\x00\x00" + end(3, 2),  # not in ascending order
        b"\x07\x00\x00\x00" + end(3, 1),
        b"\x00" + end(4, 1),  # no such form
        end(1, 2**32 - 1),
    ],
)
def test_what_no_sender_writes_is_refused(payload: bytes) -> None:
    count = int.from_bytes(payload[-4:], "little") if len(payload) > 4 else 0
    whole = memoryview(bytes(4 * min(count, 8)) + payload)
    decoder = TopK(7, np.dtype(np.float32)).decoder(GRADIENTS)
    with pytest.raises(ProtocolError, match=f"{len(whole)} bytes that are not some of 7 elements"):
        decoder.add(whole, Part(0, 1, 1), np.zeros(7, np.float32))


# Selection.


@given(st.integers(1, 20_000), st.floats(0.0001, 1), SEEDS)
@settings(deadline=None)
def test_the_largest_are_found(length: int, share: float, seed: int) -> None:
    random = np.random.RandomState(seed)
    magnitudes = np.abs(random.standard_normal(length)).astype(np.float32)
    magnitudes[random.random_sample(length) < random.random_sample()] = 0
    count = share_of(share, length)
    exact = largest(magnitudes, count, exact=True)
    sampled = largest(magnitudes, count)
    assert len(exact) == min(count, np.count_nonzero(magnitudes))
    for found in (exact, sampled):
        assert (np.diff(found) > 0).all() and (magnitudes[found] > 0).all()
    # Whether by a sample or not, nothing that is left is larger than what is taken.
    left = np.delete(magnitudes, sampled)
    assert len(sampled) == 0 or len(left) == 0 or left.max() <= magnitudes[sampled].min()


def test_a_sample_finds_nearly_as_many_as_there_should_be() -> None:
    random = np.random.RandomState(7)
    found = [len(largest(np.abs(random.standard_normal(50_000)), 500)) for _ in range(200)]
    assert max(found) == 500
    assert np.mean(found) > 495


@pytest.mark.parametrize("length", [100, 10_000])
def test_equal_elements_are_taken_from_the_first_on(length: int) -> None:
    found = largest(np.ones(length, np.float32), 10)
    np.testing.assert_array_equal(found, np.arange(10))


@pytest.mark.parametrize("length", [100, 10_000])
def test_no_number_is_larger_than_nan(length: int) -> None:
    magnitudes = np.arange(length, dtype=np.float32)
    magnitudes[[3, 50]] = np.nan
    for exact in (False, True):
        found = largest(magnitudes, 3, exact)
        np.testing.assert_array_equal(found, [3, 50, length - 1])
        np.testing.assert_array_equal(largest(magnitudes, 1, exact), [3])


# What is sent and what is kept back.


def sent(encoder: Encoder, decoder: Decoder, elements: np.ndarray, part: Part) -> np.ndarray:
    """What arrives of a slice; `out` has zeros before, as a sum begins."""
    payload = memoryview(bytearray(encoder.codec.most_bytes(len(elements))))
    payload = payload[: encoder.encode(elements, part, payload)]
    arrived = np.full(len(elements), 7, elements.dtype)
    decoder.decode(payload, part, arrived)
    total = np.ones(len(elements), elements.dtype)
    decoder.add(payload, part, total)
    np.testing.assert_array_equal(total, np.add(arrived, 1, dtype=arrived.dtype))
    return arrived


@given(
    FLOATS,
    st.floats(0.001, 1),
    st.booleans(),
    st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=4), min_size=1, max_size=5),
    SEEDS,
)
@settings(deadline=None)
def test_sent_and_residual_are_the_gradient_to_the_last_bit(
    dtype: np.dtype, share: float, exact: bool, cuts: List[List[int]], seed: int
) -> None:
    """Also where slices get other sizes, and where a job goes on with what is in the memory."""
    random = np.random.RandomState(seed)
    size = min(map(sum, cuts))
    codec = TopK(size, dtype, share, exact)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    for round_, lengths in enumerate(cuts, 1):
        gradient = random.standard_normal(size).astype(dtype)
        before = encoder.memory()["residual"].copy()
        ends = [*(end for end in accumulate(lengths) if end < size), size]
        arrived = np.empty(size, dtype)
        for first, last in zip([0, *ends], ends):
            part = Part(first, round_, round_)
            arrived[first:last] = sent(encoder, decoder, gradient[first:last], part)
            assert np.count_nonzero(arrived[first:last]) <= share_of(share, last - first)
        residual = encoder.memory()["residual"]
        np.testing.assert_array_equal(residual + arrived, before + gradient)
        assert not (arrived.astype(bool) & residual.astype(bool)).any()
        encoder = codec.encoder(GRADIENTS)
        encoder.memory()["residual"][:] = residual


def test_half_precision_keeps_back_what_rounding_leaves_over() -> None:
    codec, gradient = TopK(1, np.dtype(np.float16), 1.0), np.array([0.1], np.float16)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    total = 0.0
    for round_ in range(1, 1001):
        total += float(sent(encoder, decoder, gradient, Part(0, round_, round_))[0])
    assert total + float(encoder.memory()["residual"][0]) == 1000 * float(gradient[0])


@pytest.mark.parametrize("codec", [TopK, DGC])
def test_nan_and_infinity_are_sent_at_once_and_not_again(codec: type) -> None:
    made = codec(6, np.dtype(np.float32), share=0.5)
    encoder, decoder = made.encoder(GRADIENTS), made.decoder(GRADIENTS)
    gradient = np.float32([1, np.nan, 2, np.inf, 3, -np.inf])
    arrived = sent(encoder, decoder, gradient, Part(0, 1, 1))
    np.testing.assert_array_equal(arrived, [0, np.nan, 0, np.inf, 0, -np.inf])
    arrived = sent(encoder, decoder, np.zeros(6, np.float32), Part(0, 2, 2))
    np.testing.assert_array_equal(arrived, [1, 0, 2, 0, 3, 0])


# Values.


@given(st.floats(0.01, 1), st.integers(1, 3000), SEEDS)
@settings(deadline=None)
def test_a_worker_has_nothing_that_the_server_has_not_had_and_comes_to_have_all_of_it(
    share: float, size: int, seed: int
) -> None:
    random = np.random.RandomState(seed)
    codec = TopK(size, np.dtype(np.float32), share)
    encoder, decoder = codec.encoder(VALUES), codec.decoder(VALUES)
    value = random.standard_normal(size).astype(np.float32)
    encoder.sent_as_it_is(value, Part(0, 1, 1))
    decoder.arrived_as_it_is(value, Part(0, 1, 1))
    had, has = [value.copy()], value.copy()
    for round_ in range(2, 5):
        value += random.standard_normal(size).astype(np.float32)
        had.append(value.copy())
        differed = np.abs(value - has)
        new = sent_value(encoder, decoder, value, Part(0, round_, round_))
        changed = new != has
        assert np.count_nonzero(changed) <= share_of(share, size)
        assert not changed.any() or differed[~changed].max(initial=0) <= differed[changed].min()
        has = new
        assert (np.array(had) == has).any(axis=0).all()
    for _ in range(int(1 / share) + 1):
        has = sent_value(encoder, decoder, value, Part(0, 5, 5))
    np.testing.assert_array_equal(has, value)


def sent_value(encoder: Encoder, decoder: Decoder, value: np.ndarray, part: Part) -> np.ndarray:
    payload = memoryview(bytearray(encoder.codec.most_bytes(len(value))))
    payload = payload[: encoder.encode(value, part, payload)]
    out = np.full(len(value), np.nan, value.dtype)
    decoder.decode(payload, part, out)
    return out


@given(SEEDS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_exact_values_are_the_servers_own_whatever_the_order_and_the_sizes(
    seed: int, workers: int, servers: int, per_host: int
) -> None:
    """Rounds that all want exact, as before a checkpoint, and pulls by one worker, at any time."""
    size, rounds, random = 1200, 12, Random(seed)
    choices = CodecChoices(Choice("topk", {"share": 0.1}), Choice("topk", {"share": 0.05}))
    gradients = np.random.RandomState(seed).standard_normal((rounds, workers, size))
    with closing(MemoryJob(workers, servers, size // 4, per_host=per_host, codecs=choices)) as job:
        keys = job.declare("w", size)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.zeros(size, np.float32), None)
        exact = {round_: random.random() < 0.3 for round_ in range(1, rounds + 1)}
        targets: Dict[Tuple[int, int], np.ndarray] = {}
        pulled: Dict[Tuple[int, int], np.ndarray] = {}
        for round_ in range(1, rounds + 1):
            for rank, (worker, key) in enumerate(zip(job.workers, keys)):
                target = targets[rank, round_] = np.full(size, np.nan, np.float32)
                mine = gradients[round_ - 1, rank].astype(np.float32)
                worker.call(key, round_, mine, target, exact[round_])
                if random.random() < 0.2 or round_ == rounds:
                    target = pulled[rank, round_] = np.full(size, np.nan, np.float32)
                    worker.call(key, round_, None, target, exact=True)
        sizes, moods = [size // 5, size, size // 3], Moods(random)
        while events := list(job.events()):
            if sizes and random.random() < 0.01:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        for rank in range(workers):
            np.testing.assert_array_equal(pulled[rank, rounds], job.kept(keys[0]))
        for round_ in (one for one, is_exact in exact.items() if is_exact):
            for rank in range(1, workers):
                np.testing.assert_array_equal(targets[rank, round_], targets[0, round_])


# Deep Gradient Compression.


def paper_s(gradients: np.ndarray, share: float, momentum: float) -> np.ndarray:
    """What is sent in each step, by algorithm 4 of the paper as it stands there, for one worker."""
    u, v, found = np.zeros_like(gradients[0]), np.zeros_like(gradients[0]), []
    count = share_of(share, len(u))
    for gradient in gradients:
        u = np.float32(momentum) * u + gradient
        v = v + u
        mask = np.zeros(len(v), bool)
        mask[np.argsort(-np.abs(v), kind="stable")[:count]] = True
        found.append(np.where(mask, v, 0))
        v, u = np.where(mask, 0, v), np.where(mask, 0, u)
    return np.array(found)


def test_dgc_sends_what_the_paper_s_algorithm_sends() -> None:
    random = np.random.RandomState(3)
    gradients = random.standard_normal((30, 1000)).astype(np.float32)
    codec = DGC(1000, np.dtype(np.float32), share=0.02)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    encoder.use_momentum(0.9)
    arrived = [
        sent(encoder, decoder, gradient, Part(0, step, step))
        for step, gradient in enumerate(gradients, 1)
    ]
    np.testing.assert_array_equal(arrived, paper_s(gradients, 0.02, 0.9))


def test_dgc_with_a_share_of_1_sends_the_velocity_of_momentum_sgd() -> None:
    random = np.random.RandomState(4)
    codec = DGC(50, np.dtype(np.float32), share=1.0)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    encoder.use_momentum(0.9)
    velocity = np.zeros(50, np.float32)
    for step in range(1, 20):
        gradient = random.standard_normal(50).astype(np.float32)
        velocity = np.float32(0.9) * velocity + gradient
        arrived = sent(encoder, decoder, gradient, Part(0, step, step))
        np.testing.assert_array_equal(arrived, velocity)


def test_dgc_clips_by_the_norm_of_the_whole_gradient() -> None:
    codec = DGC(4, np.dtype(np.float32), share=1.0, clip=2.0)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    half = np.float32([3, 4])
    np.testing.assert_array_equal(sent(encoder, decoder, half, Part(0, 1, 1, norm=10.0)), half / 5)
    encoder.memory()["velocity"][:] = 0
    np.testing.assert_array_equal(sent(encoder, decoder, half, Part(0, 2, 2, norm=1.9)), half)


def test_dgc_warms_up_as_in_the_paper() -> None:
    codec = DGC(10, np.dtype(np.float32), share=0.001, warmup_steps=8)
    shares = [codec.share_at(step) for step in range(1, 11)]
    assert shares == [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.00390625] * 2 + [0.001] * 2
    assert codec.most_share == 0.25
    assert DGC(10, np.dtype(np.float32), share=0.5, warmup_steps=8).share_at(1) == 0.5


# Whole jobs.

SAID = ("gradients arrive", "dgc is sgd", "dgc learns", "others refused")


def test_a_process_alone_has_the_same_weights() -> None:
    command = [sys.executable, str(SCRIPTS / "some_elements.py")]
    result = run(command, environment(), 120)
    assert result.code == 0, result.output
    assert all(said in result.output for said in SAID), result.output


@pytest.mark.parametrize("local_aggregation", [pytest.param(0, marks=pytest.mark.long), 1])
def test_jobs_have_the_weights_of_one_process(local_aggregation: int) -> None:
    result = run_job(
        "some_elements.py", [], workers=2, servers=2, P3KV_SLICE_SIZE=700,
        P3KV_VALUE_CODEC="topk:share=0.05", P3KV_LOCAL_AGGREGATION=local_aggregation,
    )  # fmt: skip
    assert result.code == 0, result.output
    for said in ("values are exact", "dgc warms up", *SAID):
        assert result.output.count(said) == 2, result.output
    assert result.output.count("Servers keep what each of 2 workers has, 0.0 MB in all") == 5
