"""Gradient compression by a dict: which codec a user chooses for a store."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from p3kv.codecs import (
    CODECS,
    GRADIENTS,
    Codec,
    Decoder,
    Encoder,
    Part,
    check_codec,
    codec_features,
    make_codec,
    norm,
)
from p3kv.common.combinations import Feature, check
from p3kv.common.registry import Choice
from p3kv.common.words import did_you_mean
from p3kv.errors import ConfigError
from p3kv.wire.messages import Key, called


def choice(compression_params: Any) -> Choice:
    """The codec that `compression_params` name as 'type', with its parameters. Raises ConfigError
    for what is not a codec's name with plain parameters."""
    parameters = dict(compression_params) if isinstance(compression_params, dict) else {}
    name = parameters.pop("type", None)
    plain = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in parameters.items()
    }
    types = [type(name), *map(type, plain), *map(type, plain.values())]
    if not isinstance(name, str) or not {*types} <= {bool, int, float, str}:
        raise ConfigError(
            f"compression_params is {compression_params!r}; it must be a dict with a codec's name "
            f"as 'type' ({', '.join(CODECS.names())}) and the codec's parameters, such as "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    if name not in CODECS.names():
        meant = did_you_mean(name, CODECS.names()) or "."
        raise ConfigError(
            f"compression_params has {name!r} as 'type', and there is no codec '{name}', only "
            f"{', '.join(CODECS.names())}{meant}"
        )
    return Choice(name, plain)


class Compression:
    """Gradients as they would arrive on servers, in a process without any."""

    def __init__(self, chosen: Choice) -> None:
        """Raises ConfigError for a codec that is not registered, is not for gradients, or has wrong
        parameters."""
        check_codec(chosen, GRADIENTS)
        self._choice = chosen
        self._momentum = 0.0
        self._codecs: Dict[Key, Tuple[Codec, Encoder, Decoder]] = {}
        self._pushes: Dict[Key, int] = {}

    @property
    def applies_momentum(self) -> bool:
        """Whether the codec applies the optimizer's momentum."""
        return CODECS.find(self._choice.name).applies_momentum

    def use_momentum(self, optimizer: str, momentum: Optional[float]) -> None:
        """Has the codec apply the momentum of an optimizer, as `ScriptOptimizer` has it, where it
        applies any. Raises NotSupportedError as in a job."""
        if self.applies_momentum:
            features = {Feature.MOMENTUM} | (
                {Feature.OTHER_THAN_SGD} if momentum is None else set()
            )
            check(features, f"the optimizer {optimizer}")
            self._momentum = momentum or 0.0
            for _, encoder, _ in self._codecs.values():
                encoder.use_momentum(self._momentum)

    def round_trip(
        self, key: Key, gradient: np.ndarray, size_elems: int, of_rows: bool
    ) -> np.ndarray:
        """A key's next gradient, encoded and decoded; of the same shape and dtype. The key has
        `size_elems`, of which `gradient` has some rows where `of_rows`.

        Raises NotSupportedError for what the codec can't encode in a job either.
        """
        elements = gradient.ravel()
        if key not in self._codecs:
            features = codec_features(self._choice, Choice("identity"), elements.dtype)
            if of_rows:
                check({Feature.ROWS, *features}, f"{called(key, None)}, with a sparse gradient")
            made = make_codec(self._choice, GRADIENTS, size_elems, elements.dtype)
            self._codecs[key] = made, made.encoder(GRADIENTS), made.decoder(GRADIENTS)
            self._codecs[key][1].use_momentum(self._momentum)
        codec, encoder, decoder = self._codecs[key]
        if codec.in_place:
            return gradient
        push = self._pushes[key] = self._pushes.get(key, 0) + 1
        part = Part(0, push, push, norm(elements) if codec.needs_norm else 0.0)
        payload = memoryview(bytearray(codec.most_bytes(len(elements))))
        payload = payload[: encoder.encode(elements, part, payload)]
        arrived = np.empty_like(elements)
        decoder.decode(payload, part, arrived)
        return arrived.reshape(gradient.shape)
