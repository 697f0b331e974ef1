"""What slices are on the wire: by codecs that users choose and extend."""

from __future__ import annotations

from contextlib import closing
from random import Random
from typing import Dict, List

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import own_changed  # noqa: F401  registers it
from own_codec import Int8
from p3kv.codecs import (
    CODECS,
    GRADIENTS,
    VALUES,
    Float16,
    Identity,
    Part,
    TwoBit,
    check_codec,
    codec_features,
    make_codec,
    make_codecs,
)
from p3kv.codecs.zero_rows import TAIL_BYTES
from p3kv.common.combinations import Feature
from p3kv.common.registry import Choice
from p3kv.errors import ConfigError, ProtocolError
from p3kv.wire.fields import PushHeader, UpdatedHeader
from p3kv.wire.header import ENCODED, INITIAL_ROUND, WANTS_RESULT, Kind
from p3kv.wire.messages import CodecChoices, SliceSizes
from tests.consistency.test_schedules import Moods
from tests.in_memory import MemoryJob
from tests.jobs import SUMS_ONLY, run_job

FLOATS = st.sampled_from([np.dtype(np.float32), np.dtype(np.float64)])
PART = Part(0, 1, 1)
PLUGIN = {"P3KV_PLUGINS": "own_codec"}


# The members.


@given(FLOATS, st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_float16_is_what_numpy_rounds_to(dtype: np.dtype, length: int, seed: int) -> None:
    random = np.random.RandomState(seed)
    elements = (random.standard_normal(length) * 10.0 ** random.randint(-9, 6)).astype(dtype)
    kept = elements.copy()
    codec = Float16(length, dtype)
    payload = memoryview(bytearray(codec.most_bytes(length)))
    assert codec.encode(elements, PART, payload) == 2 * length
    out = np.full(length, np.nan, dtype)
    codec.decode(payload, PART, out)
    with np.errstate(over="ignore"):
        expected = elements.astype(np.float16).astype(dtype)
    np.testing.assert_array_equal(out, expected)
    total = random.standard_normal(length).astype(dtype)
    with_it = total + expected
    codec.add(payload, PART, total)
    np.testing.assert_array_equal(total, with_it)
    np.testing.assert_array_equal(elements, kept)


@pytest.mark.parametrize("size_bytes", [0, 5, 7, 8, 12])
def test_half_floats_of_another_number_are_refused(size_bytes: int) -> None:
    codec = Float16(3, np.dtype(np.float32))
    for take in (codec.decode, codec.add):
        with pytest.raises(ProtocolError, match=f"{size_bytes} bytes for 3 elements of float16"):
            take(memoryview(bytes(size_bytes)), PART, np.zeros(3, np.float32))


def test_keys_that_a_codec_does_not_carry_travel_as_they_are() -> None:
    codecs = make_codecs(Choice("float16"), Choice("float16"), 4, np.dtype(np.int32))
    assert [type(codec) for codec in codecs] == [Identity, Identity]
    codecs = make_codecs(Choice("float16"), Choice("identity"), 4, np.dtype(np.float32))
    assert [type(codec) for codec in codecs] == [Float16, Identity]


def test_a_codec_that_remembers_and_gives_no_memory_says_so() -> None:
    for name, dtype, lacks in (
        ("2bit", np.float32, False), ("int8", np.float32, False), ("float16", np.float32, False),
        ("identity", np.float32, False), ("once", np.float32, True),
        ("once", np.int32, False),  # travels as it is
    ):  # fmt: skip
        # Nothing that is kept back of values is missing in a job that goes on.
        features = codec_features(Choice(name), Choice("once"), np.dtype(dtype))
        assert (Feature.NO_MEMORY in features) == lacks, name


def test_a_name_that_nobody_has_registered_is_told_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"no codec 'zip', only 2bit, .*float16, identity, .*P3KV_PLUGINS"
    ):
        make_codec(Choice("zip"), VALUES, 4, np.dtype(np.float32))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (Choice("float16", {"threshold": 0.5}), r"'float16' \(threshold=0.5\) .* no parameters"),
        (Choice("2bit", {"treshold": 0.5}), r"'2bit' \(treshold=0.5\) .* it takes threshold"),
        (Choice("2bit", {"size_elems": 5}), "it takes threshold"),
        (Choice("2bit", {"threshold": 0}), "threshold .* is 0; .* from 1e-06 to 65504"),
        (Choice("2bit", {"threshold": -0.5}), "threshold .* is -0.5"),
        (Choice("2bit", {"threshold": float("nan")}), "threshold .* is nan"),
        (Choice("2bit", {"threshold": float("inf")}), "threshold .* is inf"),
        (Choice("2bit", {"threshold": "much"}), "threshold .* is 'much'"),
    ],
)
def test_wrong_parameters_are_told_with_those_that_are_right(choice: Choice, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_codec(choice, GRADIENTS, 0, np.dtype(np.float32))


class ForValues(Float16):
    directions = (VALUES,)


CODECS.register("values only", ForValues)


@pytest.mark.parametrize(
    ("name", "direction", "told"),
    [
        ("2bit", VALUES, r"'2bit' is for gradients only: .* float16.* \(P3KV_VALUE_CODEC\)"),
        ("values only", GRADIENTS, r"for values only: .* 2bit.* \(P3KV_GRADIENT_CODEC\)"),
    ],
)
def test_a_codec_is_refused_in_a_direction_that_it_is_not_for(
    name: str, direction: str, told: str
) -> None:
    right = VALUES if direction == GRADIENTS else GRADIENTS
    check_codec(Choice(name), right)
    make_codec(Choice(name), right, 4, np.dtype(np.float32))
    for dtype in (np.float32, np.int32):  # also where all keys would travel as they are
        with pytest.raises(ConfigError, match=told):
            make_codec(Choice(name), direction, 4, np.dtype(dtype))
    with pytest.raises(ConfigError, match=told):
        check_codec(Choice(name), direction)


# With workers and servers.


class TwoBitBothWays(TwoBit):
    """Values that lack a part are wrong weights, but show whose residual is whose."""

    directions = (GRADIENTS, VALUES)


CODECS.register("two bits both ways", TwoBitBothWays)

SIZE = 1200


def test_a_residual_stays_with_its_elements_when_slices_get_another_size() -> None:
    """Worked out for whole tensors, which have no slices."""
    random = np.random.RandomState(5)
    workers, rounds = 2, 12
    gradients = random.standard_normal((rounds, workers, SIZE)).astype(np.float32)
    with closing(MemoryJob(workers, 2, SIZE // 4, codec="two bits both ways")) as job:
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        job.finish()
        weight = np.zeros(SIZE, np.float32)
        sent_residuals = np.zeros((workers, SIZE), np.float32)
        received = np.zeros(SIZE, np.float32)
        kept_back = np.zeros(SIZE, np.float32)
        for round_, of_workers in enumerate(gradients, 1):
            if round_ in (2, 5):
                job.workers[0].tuning.want(SliceSizes(SIZE // (round_ + 1)))
            targets = [np.full(SIZE, np.nan, np.float32) for _ in keys]
            for rank, key in enumerate(keys):
                job.workers[rank].call(key, round_, of_workers[rank].copy(), targets[rank])
            job.finish()
            for residual, one in zip(sent_residuals, of_workers):
                residual += one
                weight += quantised(residual)
            # A value travels as its difference from nothing, in two bits, too.
            kept_back += weight
            received = quantised(kept_back)
            for target in targets:
                np.testing.assert_array_equal(target, received)
        assert job.workers[0].sizes.generation(rounds) == 2
        np.testing.assert_array_equal(job.kept(keys[0]), weight)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_server_knows_what_each_worker_has_whatever_the_order_and_the_sizes(
    seed: int, workers: int, servers: int, per_host: int
) -> None:
    random = Random(seed)
    choices = CodecChoices(values=Choice("changed"))
    with closing(MemoryJob(workers, servers, SIZE // 4, per_host=per_host, codecs=choices)) as job:
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        targets = [np.full(SIZE, np.nan, np.float32) for _ in keys]
        rounds, quiet = 12, 12  # rounds that change nothing, in which all that is left arrives
        gradients = np.random.RandomState(seed).standard_normal((rounds, workers, SIZE))
        for round_ in range(1, rounds + quiet + 1):
            for rank, (worker, key) in enumerate(zip(job.workers, keys)):
                gradient = gradients[round_ - 1, rank] if round_ <= rounds else np.zeros(SIZE)
                worker.call(key, round_, gradient.astype(np.float32), targets[rank])
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        while events := list(job.events()):
            if sizes and random.random() < 0.01:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        for target in targets:
            np.testing.assert_array_equal(target, job.kept(keys[0]))


def quantised(residual: np.ndarray) -> np.ndarray:
    """What travels of a residual, which keeps the rest."""
    sent = np.where(abs(residual) >= 0.5, np.sign(residual) * 0.5, 0)
    residual -= sent.astype(np.float32)
    return sent.astype(np.float32)


def push(flags: int, payload_bytes: int, round_: int = 1) -> PushHeader:
    return PushHeader(Kind.PUSH, 0, flags, payload_bytes, round=round_, step=round_)


@pytest.mark.parametrize(
    ("codec", "header"),
    [
        ("identity", push(ENCODED, 4 * SIZE + TAIL_BYTES + 1)),
        ("identity", push(ENCODED, 4 * SIZE, INITIAL_ROUND)),
        ("float16", push(ENCODED, 2 * SIZE + 1)),
        ("float16", push(ENCODED, 2 * SIZE, INITIAL_ROUND)),
        ("float16", push(WANTS_RESULT, 2 * SIZE)),
    ],
)
def test_a_server_refuses_payloads_that_the_key_s_codec_does_not_make(
    codec: str, header: PushHeader
) -> None:
    with closing(MemoryJob(1, 1, SIZE, codec=codec)) as job:
        job.declare("w", SIZE)
        (server,) = job.servers
        with pytest.raises(ProtocolError, match=f"{header.payload_bytes} .*bytes for key 'w'"):
            server.consumer.land_push(server.connections[0], header)


@pytest.mark.parametrize(
    ("codec", "payload_bytes"),
    # Of the last, only rows came that had changed, and it has not the others.
    [("float16", 2 * SIZE + 1), ("float16", 4 * SIZE), ("identity", SIZE)],
)
def test_a_worker_refuses_values_that_the_key_s_codec_does_not_make(
    codec: str, payload_bytes: int
) -> None:
    with closing(MemoryJob(1, 1, SIZE, codec=codec)) as job:
        (worker,), (key,) = job.workers, job.declare("w", SIZE)
        worker.call(key, 1, np.ones(SIZE, np.float32), np.ones(SIZE, np.float32))
        worker.begin()
        header = UpdatedHeader(
            Kind.UPDATED, 0, ENCODED, payload_bytes, key=key.key_id, round=1, step=1
        )
        with pytest.raises(ProtocolError, match=f"{payload_bytes} encoded bytes"):
            worker.data_plane.slices.land(worker.servers[0], header)


# Whole jobs.


def test_a_job_trains_with_a_codec_of_the_user_s_own() -> None:
    result = run_job(
        "encoded.py",
        [],
        workers=2,
        servers=2,
        P3KV_SLICE_SIZE=400,
        P3KV_GRADIENT_CODEC="int8",
        P3KV_VALUE_CODEC="float16",
        **PLUGIN,
    )
    assert result.code == 0, result.output
    assert result.output.count("trained in eight bits") == 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"P3KV_GRADIENT_CODEC": "zip"}, ["no codec 'zip'", "P3KV_PLUGINS"]),
        (
            {"P3KV_GRADIENT_CODEC": "topk:share=0"},
            ["the share of the codec 'topk' is 0; it must be a number above 0 and at most 1"],
        ),
        (
            {"P3KV_VALUE_CODEC": "topk:0.01"},
            ["P3KV_VALUE_CODEC is 'topk:0.01', in which '0.01' is not a parameter of its own"],
        ),
        (
            {"P3KV_VALUE_CODEC": "2bit"},
            ["the codec '2bit' is for gradients only", "For values there are bfloat16, float16, "],
        ),
    ],
)
def test_a_codec_that_is_not_there_or_not_for_values_ends_the_job_at_its_start(
    settings: Dict[str, str], told: List[str]
) -> None:
    result = run_job("join.py", [], workers=2, servers=1, **settings, **SUMS_ONLY)
    assert result.code != 0
    assert "Traceback" not in result.output
    for words in told:
        assert words in result.output


def test_a_codec_of_the_user_s_own_is_registered_by_its_module() -> None:
    assert CODECS.find("int8") is Int8
