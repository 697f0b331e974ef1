"""MXNet's gradient compression: which codec `compression_params` choose."""

from __future__ import annotations

from difflib import get_close_matches
from math import prod
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

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
)
from p3kv.common.combinations import Feature, check
from p3kv.common.registry import Choice
from p3kv.errors import ConfigError
from p3kv.frontends.mxnet.arrays import DENSE, ROW_SPARSE, check_kind
from p3kv.wire.messages import Key, called


def choice(compression_params: Any) -> Choice:
    """The codec that MXNet's `compression_params` name as 'type', with its parameters.

    Raises ConfigError for what is not a codec's name with plain parameters.
    """
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
        nearest = get_close_matches(name, CODECS.names(), n=1, cutoff=0.5)
        meant = f"; did you mean '{nearest[0]}'?" if nearest else "."
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
        self._codecs: Dict[Key, Tuple[Codec, Encoder, Decoder]] = {}
        self._pushes: Dict[Key, int] = {}

    def arrived(self, key: Key, gradients: List[NDArray]) -> NDArray:
        """The sum of a key's gradients, one for each device, encoded and decoded; of sparse ones
        the rows that they have.

        Raises NotSupportedError for what the codec can't encode in a job either.
        """
        first = gradients[0]
        for gradient in gradients:
            check_kind(called(key, None), gradient, (DENSE, ROW_SPARSE))
        total = first
        for gradient in gradients[1:]:
            total = total + gradient.as_in_context(first.context)
        of_rows = total.stype == ROW_SPARSE
        array = (total.data if of_rows else total).asnumpy()
        elements = array.ravel()
        if key not in self._codecs:
            features = codec_features(self._choice, Choice("identity"), elements.dtype)
            if of_rows:
                check({Feature.ROWS, *features}, f"{called(key, None)}, with a sparse gradient")
            made = make_codec(self._choice, GRADIENTS, prod(first.shape), elements.dtype)
            self._codecs[key] = made, made.encoder(GRADIENTS), made.decoder(GRADIENTS)
        codec, encoder, decoder = self._codecs[key]
        if codec.in_place:
            return total
        push = self._pushes[key] = self._pushes.get(key, 0) + 1
        part = Part(0, push, push)
        payload = memoryview(bytearray(codec.most_bytes(len(elements))))
        payload = payload[: encoder.encode(elements, part, payload)]
        arrived = np.empty_like(elements)
        decoder.decode(payload, part, arrived)
        arrived = arrived.reshape(array.shape)
        if of_rows:
            return mx.nd.sparse.row_sparse_array(
                (arrived, total.indices), first.shape, first.context, first.dtype
            )
        return mx.nd.array(arrived, first.context, first.dtype)
