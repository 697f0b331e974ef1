"""Deep Gradient Compression (Lin et al., ICLR'18, arXiv 1712.01887)."""

from __future__ import annotations

from typing import Dict, Optional

import numpy as np

from p3kv.codecs.codec import CODECS, GRADIENTS, Decoder, Encoder, Part
from p3kv.codecs.selection import largest, share_of
from p3kv.codecs.some_elements import SomeElements, SomeGradients, checked_share, taken, wide
from p3kv.errors import ConfigError

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
        return _Encoder(self)

    def decoder(self, direction: str) -> Decoder:
        return SomeGradients(self)


class _Encoder(Encoder):
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
