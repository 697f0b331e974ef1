"""Codecs that send some elements of a slice, unrounded, with their positions: topk and DGC."""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from typing import Dict, Optional, Tuple

import numpy as np

from p3kv.codecs.codec import CODECS, GRADIENTS, Codec, Decoder, Encoder, Part
from p3kv.errors import ConfigError, ProtocolError

_STRIDE = 13
"""One of so many elements is in the sample. It is no divisor of the usual lengths of rows and sizes
of kernels, so the sample does not have the same place of each."""
_SORTED_ELEMS = 2048
"""Fewer elements are sorted at once; a sample of them would say little."""


def share_of(share: float, length_elems: int) -> int:
    """How many of a slice's elements a share is: at least one."""
    return min(length_elems, math.ceil(share * length_elems)) if length_elems else 0


def largest(magnitudes: np.ndarray, count: int, exact: bool = False) -> np.ndarray:
    """Positions of the `count` largest elements that are not zero, in ascending order.

    Not `exact`: a sample first says from which magnitude on to look, as in Deep Gradient
    Compression (section 3.1), a little lower than its own share, and the largest of what is found
    are taken. So they are the `count` largest, or where the sample misleads, some fewer of them.
    The same arguments always give the same positions. NaN is larger than all numbers.
    """
    length = len(magnitudes)
    if exact or length <= _SORTED_ELEMS or count >= length:
        found = np.flatnonzero(magnitudes)
    else:
        sample = magnitudes[::_STRIDE]
        wanted = count / length * len(sample)
        among = min(len(sample), math.ceil(wanted + 2 * math.sqrt(wanted) + 1))
        place = len(sample) - among
        least = np.partition(sample, place)[place]
        # Not greater than or equal: NaN is neither.
        found = np.flatnonzero(~(magnitudes < least) if least > 0 else magnitudes)
    if len(found) <= count:
        return found
    candidates = magnitudes[found]
    place = len(found) - count
    least = np.partition(candidates, place)[place]
    if np.isnan(least):
        return found[np.isnan(candidates)][:count]
    above = ~(candidates <= least)
    ties = np.flatnonzero(candidates == least)[: count - np.count_nonzero(above)]
    above[ties] = True
    return found[above]


_END = struct.Struct("<BI")
"""Form and count of the positions, behind them."""
_BITMAP, _GAPS_8, _GAPS_16, _NUMBERS = range(4)
_GAPS: Dict[int, np.dtype] = {_GAPS_8: np.dtype("<u1"), _GAPS_16: np.dtype("<u2")}
_NUMBER = np.dtype("<u4")


def most_position_bytes(length_elems: int, count: int) -> int:
    """The most bytes that `count` positions in a slice of so many elements take: a bit for each
    element, or a number for each position."""
    return min(-(-length_elems // 8), count * _NUMBER.itemsize) + _END.size


def written_positions(positions: np.ndarray, length_elems: int) -> bytes:
    """Writes positions, in ascending order, in the form that takes the least bytes: one bit for
    each element of the slice; or how many elements lie between two positions, in 8 or 16 bits; or
    the positions in 32 bits."""
    count = len(positions)
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = {_BITMAP: -(-length_elems // 8), _NUMBERS: count * _NUMBER.itemsize}
    for form, dtype in _GAPS.items():
        sizes[form] = (count + int(np.sum(gaps // _most(dtype)))) * dtype.itemsize
    form = min(sizes, key=lambda one: sizes[one])
    if form == _BITMAP:
        bits = np.zeros(length_elems, bool)
        bits[positions] = True
        written = np.packbits(bits).tobytes()
    elif form == _NUMBERS:
        written = positions.astype(_NUMBER).tobytes()
    else:
        written = _written_gaps(gaps, _GAPS[form])
    return written + _END.pack(form, count)


def read_positions(
    payload: memoryview, length_elems: int, item_bytes: int
) -> Tuple[np.ndarray, memoryview]:
    """Reads positions that stand behind as many items in a payload; returns both. ProtocolError
    for what `written_positions` does not write."""
    if len(payload) < _END.size:
        raise _wrong(payload, length_elems)
    form, count = _END.unpack(payload[-_END.size :])
    items_bytes = count * item_bytes
    written = payload[items_bytes : -_END.size]
    if count > length_elems or items_bytes > len(payload) - _END.size:
        raise _wrong(payload, length_elems)
    if form == _BITMAP and len(written) == -(-length_elems // 8):
        bits = np.unpackbits(np.frombuffer(written, np.uint8))
        positions = np.flatnonzero(bits)
    elif form == _NUMBERS and len(written) == count * _NUMBER.itemsize:
        positions = np.frombuffer(written, _NUMBER).astype(np.int64)
        if np.any(np.diff(positions) < 1):
            raise _wrong(payload, length_elems)
    elif form in _GAPS and len(written) % _GAPS[form].itemsize == 0:
        numbers = np.frombuffer(written, _GAPS[form])
        if len(numbers) and numbers[-1] == _most(numbers.dtype):
            raise _wrong(payload, length_elems)  # a gap that does not end
        positions = _read_gaps(numbers)
    else:
        raise _wrong(payload, length_elems)
    if len(positions) != count or (count and positions[-1] >= length_elems):
        raise _wrong(payload, length_elems)
    return positions, payload[:items_bytes]


def _most(dtype: np.dtype) -> int:
    """The gap that says: so many elements, and then the next gap."""
    return int(np.iinfo(dtype).max)


def _written_gaps(gaps: np.ndarray, dtype: np.dtype) -> bytes:
    most = _most(dtype)
    ends = np.cumsum(gaps // most + 1)
    numbers = np.full(ends[-1] if len(ends) else 0, most, dtype)
    numbers[ends - 1] = gaps % most
    return numbers.tobytes()


def _read_gaps(numbers: np.ndarray) -> np.ndarray:
    most = _most(numbers.dtype)
    is_last = numbers != most
    # An element itself comes behind each gap that is complete.
    behind: np.ndarray = np.cumsum(numbers + is_last.astype(np.int64))
    return behind[is_last] - 1


def _wrong(payload: memoryview, length_elems: int) -> ProtocolError:
    return ProtocolError(
        f"it sent {len(payload)} bytes that are not some of {length_elems} elements and their "
        "positions"
    )


class SomeElements(Codec):
    """A codec by which some elements of a slice travel, as they are, with their positions."""

    def most_bytes(self, length_elems: int) -> int:
        count = share_of(self.most_share, length_elems)
        return count * self.dtype.itemsize + most_position_bytes(length_elems, count)

    @property
    @abstractmethod
    def most_share(self) -> float:
        """The largest share of a slice's elements that may travel."""

    def write(self, values: np.ndarray, where: np.ndarray, length: int, out: memoryview) -> int:
        """Writes values of the key's dtype with their positions in a slice of `length` elements."""
        written = written_positions(where, length)
        np.frombuffer(out, self.dtype, len(values))[:] = values
        end = values.nbytes + len(written)
        out[values.nbytes : end] = written
        return end

    def read(self, payload: memoryview, length: int) -> Tuple[np.ndarray, np.ndarray]:
        """Positions and values; ProtocolError for what `write` does not write."""
        where, values = read_positions(payload, length, self.dtype.itemsize)
        return where, np.frombuffer(values, self.dtype)


class SomeGradients(Decoder):
    """Decodes gradients of which some elements have travelled: the others are zero."""

    codec: SomeElements

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        out[:] = 0
        self.add(payload, part, out)

    def add(self, payload: memoryview, part: Part, total: np.ndarray) -> None:
        where, values = self.codec.read(payload, len(total))
        with np.errstate(over="ignore", invalid="ignore"):
            total[where] += values


def checked_share(name: str, share: object) -> float:
    """A codec's share; ConfigError for what is none."""
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 < float(share) <= 1:  # type: ignore[arg-type]
        raise ConfigError(
            f"the share of the codec '{name}' is {share!r}; it must be a number above 0 and at "
            "most 1, such as 0.01 for one element of a hundred"
        )
    return float(share)  # type: ignore[arg-type]


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype of a residual. Float16 has no room for a small gradient beside a large one."""
    return np.promote_types(dtype, np.float32)


def taken(residual: np.ndarray, where: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Takes elements out of a residual, as they travel; what rounding leaves over stays."""
    there = residual[where]
    with np.errstate(invalid="ignore", over="ignore"):
        values: np.ndarray = there.astype(dtype)
        left = there - values
    left[~np.isfinite(left)] = 0  # infinity and NaN are sent once
    residual[where] = left
    return values


class TopK(SomeElements):
    """The share of a slice's elements with the largest magnitudes travels, unrounded.

    Gradients: the sender adds an element to its residual, what of it has not been sent. Those with
    the largest residuals are sent, and their residuals are zero then. So what was sent and what is
    kept back are together all that there was.

    Values: the server keeps what each worker has. It sends the elements that differ most from that,
    and the worker keeps the others as they are. So each element that a worker has is one that the
    server has had, and no worker drifts away.

    The idea is section 2.3.3 of the modular parameter server; there the sender of values remembers
    nothing of them, and sends the largest.
    """

    of_each_worker = True

    def __init__(
        self, size_elems: int, dtype: np.dtype, share: float = 0.01, exact: bool = False
    ) -> None:
        """`share` is above 0 and at most 1. `exact`: all elements are sorted to find the largest,
        which takes several times as long as by a sample. Raises ConfigError for other values."""
        super().__init__(size_elems, dtype)
        self.share = checked_share("topk", share)
        if not isinstance(exact, bool):
            raise ConfigError(f"the codec 'topk' has exact={exact!r}; it must be true or false")
        self.exact = exact

    @property
    def most_share(self) -> float:
        return self.share

    def encoder(self, direction: str) -> Encoder:
        return _GradientEncoder(self) if direction == GRADIENTS else _ValueEncoder(self)

    def decoder(self, direction: str) -> Decoder:
        return SomeGradients(self) if direction == GRADIENTS else _ValueDecoder(self)


class _GradientEncoder(Encoder):
    codec: TopK

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._residual = np.zeros(codec.size_elems, wide(codec.dtype))

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        residual = self._residual[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(residual, elements, out=residual)
        count = share_of(self.codec.share, len(elements))
        where = largest(np.abs(residual), count, self.codec.exact)
        return self.codec.write(taken(residual, where, self.codec.dtype), where, len(elements), out)

    def memory(self) -> Dict[str, np.ndarray]:
        return {"residual": self._residual}


class _ValueEncoder(Encoder):
    codec: TopK

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._has = np.zeros(codec.size_elems, codec.dtype)
        """What the worker has."""

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        has = self._has[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.abs(elements - has)
        count = share_of(self.codec.share, len(elements))
        where = largest(changes, count, self.codec.exact)
        values = elements[where]
        has[where] = values
        return self.codec.write(values, where, len(elements), out)

    def sent_as_it_is(self, elements: np.ndarray, part: Part) -> None:
        self._has[part.offset : part.offset + len(elements)] = elements


class _ValueDecoder(Decoder):
    codec: TopK

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._has = np.zeros(codec.size_elems, codec.dtype)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        where, values = self.codec.read(payload, len(out))
        has = self._has[part.offset : part.offset + len(out)]
        has[where] = values
        out[:] = has

    def arrived_as_it_is(self, elements: np.ndarray, part: Part) -> None:
        self._has[part.offset : part.offset + len(elements)] = elements


CODECS.register("topk", TopK)


_STAGES = 4
"""Of the warm-up: shares of 1/4, 1/16, 1/64 and 1/256, as over the paper's epochs."""
_MOST_STEPS = 2**31 - 1


class DGC(SomeElements):
    """Momentum is applied on the worker, and what it gives is kept back until it is large.

    Momentum correction (section 3.2, equation 4): each element has a velocity, u = momentum * u +
    gradient, and a residual v to which u is added. The share of elements with the largest residuals
    is sent. Their residuals become zero, and so do their velocities (momentum factor masking,
    section 3.3), whose direction is old by then; but not where all elements of a slice are sent,
    since nothing is old there. The servers' optimizer applies no momentum to gradients any more, so
    with a share of 1 a job's weights are those of SGD with momentum, as long as the learning rate
    stays: a new rate holds at once for what u has gathered before, as in the paper.

    Local gradient clipping (section 3.2): a gradient whose norm is above `clip` is scaled to it,
    before anything is added. The norm is that of the key's whole gradient on one worker, as in the
    authors' own code. The paper divides the threshold for the sum by the square root of the number
    of workers; `clip` is what is divided already.

    Warm-up (section 3.3): during the first `warmup_steps` steps the share is 1/4, then 1/16, 1/64
    and 1/256, as long as it is above `share`.
    """

    directions = (GRADIENTS,)
    applies_momentum = True

    def __init__(
        self,
        size_elems: int,
        dtype: np.dtype,
        share: float = 0.001,
        clip: Optional[float] = None,
        warmup_steps: int = 0,
    ) -> None:
        """Raises ConfigError for values out of range."""
        super().__init__(size_elems, dtype)
        self.share = checked_share("dgc", share)
        if clip is not None and (isinstance(clip, (bool, str)) or not 0 < clip < np.inf):
            raise ConfigError(f"clip of the codec 'dgc' is {clip!r}; it must be a number above 0")
        self.clip = clip
        self.needs_norm = clip is not None
        if type(warmup_steps) is not int or not 0 <= warmup_steps <= _MOST_STEPS:
            raise ConfigError(
                f"warmup_steps of the codec 'dgc' is {warmup_steps!r}; it must be a whole number "
                f"from 0 to {_MOST_STEPS}"
            )
        self._warmup_steps = warmup_steps

    @property
    def most_share(self) -> float:
        return self.share_at(1)

    def share_at(self, step: int) -> float:
        """The share that is sent in a step, the first of which is 1."""
        if step > self._warmup_steps:
            return self.share
        stage = (step - 1) * _STAGES // self._warmup_steps
        return max(self.share, 0.25 ** (stage + 1))

    def encoder(self, direction: str) -> Encoder:
        return _MomentumEncoder(self)

    def decoder(self, direction: str) -> Decoder:
        return SomeGradients(self)


class _MomentumEncoder(Encoder):
    codec: DGC

    def __init__(self, codec: DGC) -> None:
        super().__init__(codec)
        self._momentum = 0.0
        dtype = wide(codec.dtype)
        self._velocity = np.zeros(codec.size_elems, dtype)
        self._residual = np.zeros(codec.size_elems, dtype)

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        codec, here = self.codec, slice(part.offset, part.offset + len(elements))
        velocity, residual = self._velocity[here], self._residual[here]
        with np.errstate(invalid="ignore", over="ignore"):
            if codec.clip is not None and part.norm > codec.clip:
                elements = elements * velocity.dtype.type(codec.clip / part.norm)
            velocity *= velocity.dtype.type(self._momentum)
            velocity += elements
            residual += velocity
        count = share_of(codec.share_at(part.step), len(elements))
        where = largest(np.abs(residual), count)
        values = taken(residual, where, codec.dtype)
        if count < len(elements):
            velocity[where] = 0
        return codec.write(values, where, len(elements), out)

    def use_momentum(self, momentum: float) -> None:
        self._momentum = momentum

    def memory(self) -> Dict[str, np.ndarray]:
        return {"velocity": self._velocity, "residual": self._residual}


CODECS.register("dgc", DGC)
