"""Processor time of codecs alone, on one core, with no network and no engine around them."""

from __future__ import annotations

import time
from typing import List, NamedTuple, Tuple

import numpy as np

from p3kv.codecs import GRADIENTS, VALUES, Codec, Part, make_codecs
from p3kv.common.registry import choice_of

_SLICE_ELEMS, _SLICES = 50_000, 40
_ELEMS = _SLICE_ELEMS * _SLICES
_ROUNDS = 7
_WORKERS = 4
_FLOAT = np.dtype(np.float32)


class Cost(NamedTuple):
    """Processor seconds for each gigabyte of gradients that a worker synchronises, on four hosts
    that each have a worker and a server."""

    worker_s: float
    """It encodes its gradients, and decodes as much of values."""
    server_s: float
    """It adds its part of all workers' gradients, and encodes its part of the values: once, or for
    each worker."""


def cost(gradients: str, values: str, momentum: float) -> Cost:
    """Measures codecs, each chosen as in a setting; takes a second or two.

    Gradients are normally distributed, and others in each round. A number is the least of several
    rounds, since other work on the machine only ever adds to it.
    """
    choices = choice_of(gradients, "gradients"), choice_of(values, "values")
    codecs = make_codecs(*choices, _ELEMS, _FLOAT)
    there, back = _Way(codecs.gradients, GRADIENTS, momentum), _Way(codecs.values, VALUES)
    drawn = np.random.default_rng(1)
    value = drawn.standard_normal(_ELEMS, dtype=_FLOAT)
    for number in range(1, _ROUNDS + 1):
        gradient = drawn.standard_normal(_ELEMS, dtype=_FLOAT) * _FLOAT.type(0.01)
        there.round(number, gradient)
        value -= gradient
        back.round(number, value)
    encode, _, add = there.least_s()
    encode_values, decode, _ = back.least_s()
    # A server has one of so many parts of the values, and all workers' gradients of this part.
    times = 1 if codecs.values.of_each_worker else 1 / _WORKERS
    per_gb = 1e9 / (_ELEMS * _FLOAT.itemsize)
    return Cost(
        round((encode + decode) * per_gb, 3), round((add + encode_values * times) * per_gb, 3)
    )


class _Way:
    """One direction: an encoder, a decoder, and what they have taken in each round."""

    def __init__(self, codec: Codec, direction: str, momentum: float = 0.0) -> None:
        self._codec = codec
        if not codec.in_place:
            self._encoder, self._decoder = codec.encoder(direction), codec.decoder(direction)
            self._encoder.use_momentum(momentum)
        self._total = np.zeros(_SLICE_ELEMS, _FLOAT)
        self._taken_s: List[Tuple[float, float, float]] = []

    def round(self, number: int, elements: np.ndarray) -> None:
        """All slices are encoded, decoded, and added to something."""
        slices = elements.reshape(_SLICES, _SLICE_ELEMS)
        if self._codec.in_place:
            began = time.process_time()
            for one in slices:
                np.add(self._total, one, out=self._total)
            self._taken_s.append((0.0, 0.0, time.process_time() - began))
            return
        parts = [Part(place * _SLICE_ELEMS, number, number) for place in range(_SLICES)]
        began, payloads, received = time.process_time(), [], np.empty_like(self._total)
        for one, part in zip(slices, parts):
            out = memoryview(bytearray(self._codec.most_bytes(_SLICE_ELEMS)))
            payloads.append(out[: self._encoder.encode(one, part, out)])
        encoded = time.process_time()
        for payload, part in zip(payloads, parts):
            self._decoder.decode(payload, part, received)
        decoded = time.process_time()
        for payload, part in zip(payloads, parts):
            self._decoder.add(payload, part, self._total)
        added = time.process_time()
        self._taken_s.append((encoded - began, decoded - encoded, added - decoded))

    def least_s(self) -> Tuple[float, float, float]:
        """To encode, decode and add; the first round, which begins without a memory, is another."""
        encode, decode, add = zip(*self._taken_s[1:])
        return min(encode), min(decode), min(add)
