"""Slices on the wire: as they are in memory, or as a codec encodes them."""

from p3kv.codecs.codec import (
    CODECS,
    GRADIENTS,
    VALUES,
    Codec,
    Decoder,
    Encoder,
    KeyCodecs,
    Part,
    Stateless,
    check_codec,
    codec_features,
    codec_of,
    make_codec,
    make_codecs,
    norm,
    part_of_rows,
)
from p3kv.codecs.plain import BFloat16, Float16, Identity
from p3kv.codecs.some_elements import DGC, TopK
from p3kv.codecs.two_bit import TwoBit

__all__ = [
    "CODECS", "DGC", "GRADIENTS", "VALUES", "BFloat16", "Codec", "Decoder", "Encoder", "Float16",
    "Identity", "KeyCodecs", "Part", "Stateless", "TopK", "TwoBit", "check_codec",
    "codec_features", "codec_of", "make_codec", "make_codecs", "norm", "part_of_rows",
]  # fmt: skip
