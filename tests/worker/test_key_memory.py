"""Whatever is encoded when: a copy is what the codec remembers between two rounds."""

from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.codecs import GRADIENTS, Codec, Decoder, Encoder, Part
from p3kv.errors import ConfigError
from p3kv.worker.saving.key_memory import KeyMemory, MemoryCopy

SIZE, ROUNDS = 12, 6


class Summing(Codec):
    """Remembers the last gradient, and the sum of all."""

    def most_bytes(self, length_elems: int) -> int:
        return 0

    def encoder(self, direction: str) -> Encoder:
        return SummingEncoder(self)

    def decoder(self, direction: str) -> Decoder:
        raise AssertionError("nothing arrives")


class SummingEncoder(Encoder):
    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._arrays = {
            "sum": np.zeros(codec.size_elems),
            "last": np.zeros(codec.size_elems, np.int32),
        }

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        place = slice(part.offset, part.offset + len(elements))
        self._arrays["sum"][place] += elements
        self._arrays["last"][place] = part.round
        return 0

    def memory(self) -> Dict[str, np.ndarray]:
        return self._arrays


def made(size: int = SIZE) -> KeyMemory:
    return KeyMemory(Summing(size, np.dtype(np.float32)).encoder(GRADIENTS), "key 'w'")


def encode(memory: KeyMemory, offset: int, length: int, round: int) -> None:
    elements = np.full(length, 10**round, np.float32)
    memory.encode(elements, Part(offset, round, round), memoryview(b""))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.booleans(), min_size=ROUNDS, max_size=ROUNDS),
    st.lists(st.integers(1, SIZE), min_size=ROUNDS, max_size=ROUNDS),
    st.sets(st.integers(0, ROUNDS)),
    st.data(),
)
def test_a_copy_is_of_one_round_whatever_is_encoded_when(
    with_gradient: List[bool], sizes: List[int], cuts: set, data: st.DataObject
) -> None:
    """Pushes come in the order of rounds, and a cut between those of two rounds, or when the push
    of its own round is still to come; slices are encoded in any order that keeps that of each
    element."""
    memory = made()
    queued: List[Tuple[int, int, int]] = []
    copies: List[Tuple[int, MemoryCopy]] = []

    def encode_some() -> None:
        while queued and data.draw(st.booleans()):
            first = [
                one for i, one in enumerate(queued)
                if not any(b < one[0] + one[1] and one[0] < b + n for b, n, _ in queued[:i])
            ]  # fmt: skip
            chosen = data.draw(st.sampled_from(first))
            queued.remove(chosen)
            encode(memory, *chosen)

    for round_ in range(ROUNDS + 1):
        early = round_ in cuts and round_ > 0 and data.draw(st.booleans())
        if early:
            copies.append((round_, memory.begin_copy(round_)))
            encode_some()
        if round_ and with_gradient[round_ - 1]:
            size = sizes[round_ - 1]
            queued += [(i, min(size, SIZE - i), round_) for i in range(0, SIZE, size)]
        elif round_:
            memory.push_without_gradient(round_)
        encode_some()
        if round_ in cuts and not early:
            copies.append((round_, memory.begin_copy(round_)))
        encode_some()
    for rest in queued:
        encode(memory, *rest)
    assert {round_ for round_, _ in copies} == cuts
    for round_, copy in copies:
        pushed = [n for n in range(1, round_ + 1) if with_gradient[n - 1]]
        arrays = copy.complete.result(timeout=0)
        assert (arrays["sum"] == sum(10**n for n in pushed)).all()
        assert (arrays["last"] == max(pushed, default=0)).all()


def test_what_is_taken_back_must_be_of_the_same_kind() -> None:
    memory = made()
    assert not memory.restore({"sum": np.ones(SIZE)})
    assert not memory.restore({"sum": np.ones(SIZE), "last": np.ones(SIZE, np.int64)})
    assert not memory.restore({"sum": np.ones(SIZE - 1), "last": np.ones(SIZE - 1, np.int32)})
    assert (memory.memory()["sum"] == 0).all()
    assert memory.restore({"sum": np.ones(SIZE), "last": np.ones(SIZE, np.int32)})
    encode(memory, 3, SIZE - 3, 1)
    assert memory.memory()["sum"].tolist() == [1.0] * 3 + [11.0] * (SIZE - 3)


@pytest.mark.parametrize("array", [np.zeros(SIZE - 1), np.zeros((SIZE, 1)), np.zeros(SIZE, "U1")])
def test_a_memory_that_checkpoints_can_not_have_is_refused(array: np.ndarray) -> None:
    encoder = Summing(SIZE, np.dtype(np.float32)).encoder(GRADIENTS)
    encoder.memory()["more"] = array
    with pytest.raises(ConfigError, match=r"gradients of key 'w' remembers 'more', of shape"):
        KeyMemory(encoder, "key 'w'")
