"""Interface of codecs, and the table from which a key's codecs are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Dict, NamedTuple, Set, Tuple, Type

import numpy as np

from p3kv.common.combinations import Feature
from p3kv.common.registry import Choice, Registry, choice_of
from p3kv.config import Settings
from p3kv.errors import ConfigError

GRADIENTS, VALUES = "gradients", "values"
"""The directions: to the servers, and back to the workers."""


class Part(NamedTuple):
    """Place of a slice in its key, and the time when it travels."""

    offset: int
    """The first element, among those that the process keeps of the key."""
    round: int
    step: int
    """Number of the step, from 1; of gradients, among those of their store, also those before a job
    went on from a checkpoint."""
    norm: float = 0.0
    """Euclidean norm of the worker's whole gradient of the key, where the codec `needs_norm`."""


def part_of_rows(round: int) -> Part:
    """Some rows of a key, wherever they are. Only codecs without a memory encode them, which need
    the elements alone."""
    return Part(0, round, 0)


def norm(elements: np.ndarray) -> float:
    """Euclidean norm, for `Part.norm`; added up in single precision at least."""
    wide = elements.astype(np.promote_types(elements.dtype, np.float32), copy=False)
    return float(np.linalg.norm(wide))


class Encoder(ABC):
    """Encodes a key's slices in one direction, in the process that sends them.

    Called from one thread, for each part of the key in the order of rounds. It may keep what it did
    not send (a residual) for the next round, by element, because the slices of a later round may
    have other sizes.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @abstractmethod
    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        """Writes a slice into `out`, which has `most_bytes`, and returns how many bytes it has.

        `elements` must stay as they are.
        """

    def memory(self) -> Dict[str, np.ndarray]:
        """The arrays in which it keeps what it remembers, by name, for checkpoints: flat, always
        the same ones, with an item for each element that the process keeps of the key. They are
        copied between two calls of `encode`, and a job that goes on writes into them before the
        first.

        Of an encoder of gradients that has none though its codec `remembers`, jobs with checkpoints
        are refused. Encoders of values need none: what they kept back has arrived when a job goes
        on, because all workers begin with the servers' own values.
        """
        return {}

    def use_momentum(self, momentum: float) -> None:  # noqa: B027
        """The optimizer has this momentum, from the next gradient on. To be told where the codec
        `applies_momentum`, before the first gradient."""

    def sent_as_it_is(self, elements: np.ndarray, part: Part) -> None:  # noqa: B027
        """A slice travels as it is in memory, and not encoded, or is the initial value that worker
        rank 0 has given. To be told where `of_each_worker`: the worker then has these elements."""


class Decoder(ABC):
    """Decodes a key's slices in one direction, in the process that receives them. Called from one
    thread.

    A server has one decoder for the gradients of all workers, which come in any order. So it must
    remember nothing of them; checkpoints have nothing of what decoders remember.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @abstractmethod
    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        """Writes a slice's elements into `out`; ProtocolError for a payload that no encoder
        makes."""

    def add(self, payload: memoryview, part: Part, total: np.ndarray) -> None:
        """Adds a slice's elements to `total`, as `decode` gives them.

        `total` is of the key's dtype, or float32 where the key is of half precision.
        """
        elements = np.empty(len(total), self.codec.dtype)
        self.decode(payload, part, elements)
        np.add(total, elements, out=total)

    def arrived_as_it_is(self, elements: np.ndarray, part: Part) -> None:  # noqa: B027
        """A slice has arrived that was not encoded, or this worker has given its initial value. To
        be told where `of_each_worker`."""


class Codec(ABC):
    """Form of the slices of one key on the wire, in one direction.

    Every process makes one object for each key and direction, and of that what it needs there: an
    encoder or a decoder. What encodes and decodes without a memory derives from `Stateless`.
    """

    directions: Tuple[str, ...] = (GRADIENTS, VALUES)
    """What the codec may encode. The part of a gradient that a codec keeps back arrives with a
    later gradient, so their sum is right. A value that lacks a part is a wrong weight, so a codec
    whose values may be far from what they stand for is for gradients only."""

    remembers = True
    """Whether what a slice becomes depends on what was encoded before."""

    of_each_worker = False
    """Of values: whether each worker is sent something else, by what it has. Then a server makes an
    encoder for each worker, and the initial value of a slice, or else the first one that it sends
    to a worker, travels as it is. If not, a server encodes a value once, and sends the same bytes
    to all."""

    needs_norm = False
    """Of gradients: whether encoders need the norm of a key's whole gradient (`Part.norm`)."""

    applies_momentum = False
    """Of gradients: whether encoders apply the optimizer's momentum (`Encoder.use_momentum`), and
    the servers do not. So the codec is for SGD with momentum only."""

    in_place = False
    """Whether slices travel as they are in memory; then there are no encoders and decoders."""

    def __init__(self, size_elems: int, dtype: np.dtype) -> None:
        """How many elements the process keeps of the key, and their dtype.

        A codec of its own may take parameters besides, by name: plain values that travel with the
        codec's name. It raises ConfigError for wrong ones, also for a key without elements.
        """
        self.size_elems = size_elems
        self.dtype = dtype

    @classmethod
    def carries(cls, dtype: np.dtype) -> bool:
        """Whether the codec is for keys of this dtype; others travel as they are in memory."""
        return dtype.kind == "f"

    @abstractmethod
    def most_bytes(self, length_elems: int) -> int:
        """The most bytes that a slice of so many elements may have on the wire."""

    @abstractmethod
    def encoder(self, direction: str) -> Encoder:
        """Makes what encodes slices that leave in a direction, with nothing in its memory."""

    @abstractmethod
    def decoder(self, direction: str) -> Decoder:
        """Makes what decodes slices that come in a direction, with nothing in its memory."""


class Stateless(Codec, Encoder, Decoder):
    """A codec by which what travels of a slice depends on the slice alone: its own encoder and
    decoder, in both directions."""

    remembers = False

    def __init__(self, size_elems: int, dtype: np.dtype) -> None:
        super().__init__(size_elems, dtype)
        self.codec = self

    def encoder(self, direction: str) -> Encoder:
        return self

    def decoder(self, direction: str) -> Decoder:
        return self


_VARIABLES = {GRADIENTS: "P3KV_GRADIENT_CODEC", VALUES: "P3KV_VALUE_CODEC"}
_REMEMBERING = {GRADIENTS: Feature.REMEMBERING, VALUES: Feature.REMEMBERS_VALUES}
CODECS: Registry[Codec] = Registry(
    "codec", "every worker and server", " or ".join(_VARIABLES.values())
)
"""Codecs by name."""


class KeyCodecs(NamedTuple):
    """A key's codecs in one process."""

    gradients: Codec
    values: Codec


def check_codec(choice: Choice, direction: str) -> None:
    """Raises ConfigError for a codec that nobody has registered here, that is not for this
    direction, or whose parameters are wrong."""
    _find(choice, direction)
    CODECS.make(choice, 0, np.dtype(np.float32))


def codec_of(settings: Settings, direction: str) -> Choice:
    """The codec that the settings choose for a direction; raises what `check_codec` raises."""
    text = settings.gradient_codec if direction == GRADIENTS else settings.value_codec
    choice = choice_of(text, _VARIABLES[direction])
    check_codec(choice, direction)
    return choice


def make_codec(choice: Choice, direction: str, size_elems: int, dtype: np.dtype) -> Codec:
    """The codec of a key in one direction; raises what `check_codec` raises."""
    if not _find(choice, direction).carries(dtype):
        choice = Choice("identity")
    return CODECS.make(choice, size_elems, dtype)


def make_codecs(gradients: Choice, values: Choice, size_elems: int, dtype: np.dtype) -> KeyCodecs:
    """The codecs of a key; raises what `make_codec` raises."""
    return KeyCodecs(
        make_codec(gradients, GRADIENTS, size_elems, dtype),
        make_codec(values, VALUES, size_elems, dtype),
    )


def codec_features(gradients: Choice, values: Choice, dtype: np.dtype) -> Set[Feature]:
    """Features of a key with these codecs that may not go together with others; raises what
    `make_codec` raises."""
    found = set()
    for direction, choice in ((GRADIENTS, gradients), (VALUES, values)):
        codec = make_codec(choice, direction, 0, dtype)
        if not CODECS.find(choice.name).in_place:
            found |= {Feature.CODEC, Feature.UNCARRIED} if codec.in_place else {Feature.CODEC}
        if codec.remembers or codec.of_each_worker:
            found.add(_REMEMBERING[direction])
        if codec.applies_momentum:
            found.add(Feature.MOMENTUM)
        if codec.needs_norm:
            found.add(Feature.NEEDS_NORM)
        if direction == GRADIENTS and codec.remembers and not codec.encoder(direction).memory():
            found.add(Feature.NO_MEMORY)
        if direction == GRADIENTS and not codec.in_place and dtype == np.float16:
            found.add(Feature.HALF_ENCODED)
    return found


def _find(choice: Choice, direction: str) -> Type[Codec]:
    found = CODECS.find(choice.name)
    if direction not in found.directions:
        able = [name for name in CODECS.names() if direction in CODECS.find(name).directions]
        raise ConfigError(
            f"the codec {choice} is for {' and '.join(found.directions)} only: {direction} would "
            f"arrive wrong. For {direction} there are {', '.join(able)} "
            f"({_VARIABLES[direction]})"
        )
    return found
