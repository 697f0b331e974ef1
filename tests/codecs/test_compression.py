"""Gradient compression: elements of two bits, with the numbers of MXNet's own `dist_sync`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Dict, List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.codecs import GRADIENTS, Encoder, Part, TwoBit
from p3kv.errors import ProtocolError
from tests.jobs import JOB_S, SCRIPTS, JobResult, held_port, results, run_job, start_role

FLOATS = st.sampled_from([np.dtype(name) for name in ("float16", "float32", "float64")])
PART = Part(0, 1, 1)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def sent_of(residual: np.ndarray, gradient: np.ndarray, threshold: float) -> np.ndarray:
    """What travels of a gradient, element by element; `residual` keeps the rest."""
    limit = residual.dtype.type(gradient.dtype.type(threshold))
    sent = np.zeros_like(gradient)
    for at, element in enumerate(gradient):
        wanted = residual[at] + element
        if wanted >= limit:
            sent[at] = limit
            wanted -= limit
        elif wanted <= -limit:
            sent[at] = -limit
            wanted += limit
        residual[at] = wanted
    return sent


def encoded(encoder: Encoder, elements: np.ndarray, offset: int = 0) -> memoryview:
    payload = memoryview(bytearray(encoder.codec.most_bytes(len(elements))))
    assert encoder.encode(elements, Part(offset, 1, 1), payload) == len(payload)
    return payload


@given(
    FLOATS, st.lists(LENGTHS, min_size=1, max_size=4), st.floats(0.01, 2), st.integers(0, 2**32 - 1)
)
def test_slices_of_any_sizes_give_what_the_whole_tensor_gives_element_by_element(
    dtype: np.dtype, cuts: List[List[int]], threshold: float, seed: int
) -> None:
    random = np.random.RandomState(seed)
    size = min(map(sum, cuts))
    codec = TwoBit(size, dtype, threshold)
    sender, receiver = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    residual = np.zeros(size, np.float64 if dtype == np.float64 else np.float32)
    for lengths in cuts:
        gradient = (random.standard_normal(size) * threshold).astype(dtype)
        gradient[random.randint(size)] = threshold  # reached exactly, where nothing is kept back
        kept = gradient.copy()
        expected = sent_of(residual, gradient, threshold)
        begin = random.standard_normal(size).astype(dtype)
        total, decoded = begin.copy(), np.full(size, np.nan, dtype)
        ends = [*(end for end in accumulate(lengths) if end < size), size]
        for start, end in zip([0, *ends], ends):
            payload = encoded(sender, gradient[start:end], start)
            assert len(payload) == 2 * -(-(end - start) // 8)
            receiver.decode(payload, Part(start, 1, 1), decoded[start:end])
            receiver.add(payload, Part(start, 1, 1), total[start:end])
        np.testing.assert_array_equal(decoded, expected)
        np.testing.assert_array_equal(total, begin + expected)
        np.testing.assert_array_equal(gradient, kept)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_small_gradients_add_up_beside_a_large_residual(dtype: str) -> None:
    """In float16, 0.25 + 0.0001 is 0.25."""
    codec, gradient = TwoBit(1, np.dtype(dtype)), np.array([0.0001], dtype)
    steps, total = 12_000, np.zeros(1, np.float64)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    for _ in range(steps):
        sent = np.empty(1, dtype)
        decoder.decode(encoded(encoder, gradient), PART, sent)
        total += sent
    assert total == 1.0  # of 1.2, in steps of 0.5


def test_what_is_no_number_does_not_harm_its_neighbours() -> None:
    codec = TwoBit(4, np.dtype(np.float32), 1)
    encoder, decoder = codec.encoder(GRADIENTS), codec.decoder(GRADIENTS)
    out = np.zeros(4, np.float32)
    for round_ in range(3):
        payload = encoded(encoder, np.float32([np.nan, np.inf, -np.inf, 1]))
        decoder.decode(payload, PART, out)
        np.testing.assert_array_equal(out, [0, 1, -1, 1], f"round {round_}")


@pytest.mark.parametrize(
    ("length", "payload"),
    [
        (3, b""),
        (3, bytes(1)),
        (3, bytes(3)),
        (9, bytes(2)),
        (8, b"\x01\x01"),  # an element is the threshold and its negative
        (16, b"\x00\x08\x00\x18"),
        (3, b"\x10\x00"),  # an element behind the last
        (9, b"\x00\x00\x00\x40"),
    ],
)
def test_payloads_that_no_sender_makes_are_refused(length: int, payload: bytes) -> None:
    decoder = TwoBit(length, np.dtype(np.float32)).decoder(GRADIENTS)
    for take in (decoder.decode, decoder.add):
        out = np.full(length, 7, np.float32)
        with pytest.raises(ProtocolError, match=f"{length} elements of two bits"):
            take(memoryview(payload), PART, out)
        np.testing.assert_array_equal(out, 7)


# Whole jobs.

SCRIPT = str(SCRIPTS / "compressed.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def ours(folder: Path) -> JobResult:
    return run_job("compressed.py", ["p3", folder], workers=2, servers=1, P3KV_SLICE_SIZE=300)


def test_trainers_compress_and_have_the_weights_that_one_process_works_out(ours: JobResult) -> None:
    """Which MXNet's own store refuses: its pushpull does not compress."""
    assert ours.output.count("compressed by the Trainer") == 2, ours.output


def test_workers_that_choose_differently_all_learn_it(ours: JobResult) -> None:
    for part in ("worker 0", "worker 1"):
        (learned,) = re.findall(r"learned: .*", ours.said_by(part))
        for words in (
            "workers disagree on key 'w'",
            "worker 0 has shape (3,)",
            "codecs '2bit' (threshold=0.25) for gradients",
            "worker 1 has shape (3,)",
            "codecs '2bit' (threshold=0.5) for gradients",
            "the same settings and codecs",
        ):
            assert words in learned
    assert ours.code == 1


def test_values_are_those_of_mxnet_s_own_store_bit_for_bit(ours: JobResult, folder: Path) -> None:
    """The same pushes to both stores, for sums and for an optimizer with momentum."""
    with held_port() as holder:
        port = holder.getsockname()[1]
        start = time.monotonic()
        command = [sys.executable, SCRIPT, "dist_sync", str(folder)]
        serve = [sys.executable, "-c", "import mxnet"]
        processes: Dict[str, subprocess.Popen] = {
            name: start_role(role, one, port, 2, 1, DMLC_NODE_HOST="127.0.0.1")
            for name, role, one in [
                ("scheduler", "scheduler", serve), ("server", "server", serve),
                ("worker", "worker", command), ("other worker", "worker", command),
            ]
        }  # fmt: skip
        ended = results(processes, start, timeout_s=JOB_S)
    assert all(one.code == 0 for one in ended.values()), {n: o.output for n, o in ended.items()}
    values = {store: np.load(folder / f"{store}.npz") for store in ("p3", "dist_sync")}
    names = values["p3"].files
    assert len(names) > 20
    assert names == values["dist_sync"].files
    for name in names:
        mine, theirs = (values[store][name] for store in ("p3", "dist_sync"))
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32), name)
