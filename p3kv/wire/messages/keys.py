"""Declarations of keys by workers, and what all processes then know of them."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence, Tuple, Union

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name then
import numpy as np

from p3kv.common.registry import Choice
from p3kv.common.words import some_of
from p3kv.config import Settings
from p3kv.wire.messages.base import MAX_RANK, Message, check, check_choice, check_name, check_number

MAX_KEY_ELEMS = 2**36
"""Elements of a key's tensor: a quarter of a terabyte of float32."""
MAX_KEY_CHARS = 4096
MAX_DIMENSIONS = 32
_HALVES = ("float16", "bfloat16")
DTYPES = (*_HALVES, "float32", "float64", "int8", "uint8", "int32", "int64")
"""All that can be summed: no bool."""

Key = Union[int, str]
MAX_KEY_ID = 2**32 - 1
MAX_STORE = 2**16 - 1
"""A process may have several stores, numbered in the order in which it creates them. Each has keys
and an optimizer of its own."""


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which gradients of a key of `dtype` are summed.

    Half-precision numbers are summed in single precision until all gradients are in: an optimizer
    with multiple precision takes the sum as it is, and others have it rounded once.
    """
    return np.dtype(np.float32) if dtype.name in _HALVES else dtype


def called(key: Key, name: Optional[str]) -> str:
    """A key's name in messages to users, with the parameter's name if it is known."""
    return f"key {key!r}" if name is None or name == key else f"parameter '{name}' (key {key!r})"


def all_called(keys: Sequence[Key]) -> str:
    """Keys in messages, the first few of many."""
    if not keys:
        return "no keys"
    return f"key{'' if len(keys) == 1 else 's'} {some_of([repr(key) for key in keys])}"


class CodecChoices(Message, frozen=True):
    """By which codecs a key's slices travel."""

    gradients: Choice = Choice(Settings.gradient_codec)
    values: Choice = Choice(Settings.value_codec)

    def __post_init__(self) -> None:
        for choice in (self.gradients, self.values):
            check_name("a codec's name", choice.name)
            for name, value in choice.parameters.items():
                check_name("the name of a codec's parameter", name)
                if isinstance(value, str):
                    check_name("a codec's parameter", value)


class SeededRows(Message, frozen=True):
    """Initial rows that each server makes from a seed (`p3kv.common.seeded_rows`), in place of
    those that worker rank 0 pushes."""

    seed: int
    std: float
    uniform: bool = False
    """Uniform around 0, in place of normal."""
    zero_row: int = -1
    """A row that is 0; -1: none."""

    def __post_init__(self) -> None:
        check_number("a seed", self.seed, 0, 2**64 - 1)
        check(0 <= self.std < float("inf"), f"rows have the standard deviation {self.std}")
        check_number("a row", self.zero_row, -1, MAX_KEY_ELEMS)


MAX_MEMBERS = 32
"""Most tensors of a bucket: headers have a bit for each."""


class Member(Message, frozen=True):
    """A tensor of a bucket, with the key that it would have on its own."""

    key: Key
    shape: Tuple[int, ...]
    name: Optional[str] = None

    @property
    def size_elems(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class DeclareKey(Message, frozen=True):
    """A worker declares a key."""

    key: Key
    shape: Tuple[int, ...]
    dtype: str
    name: Optional[str] = None
    """User's name for the parameter, where the front end knows. Workers may differ as
    `p3kv.common.naming.SameNames` allows."""
    layout: str = "dense"
    """How its tensor may be divided, by the name in `p3kv.slicing.LAYOUTS`."""
    codecs: CodecChoices = CodecChoices()
    store: int = 0
    whole: bool = False
    """Whether one server must keep all elements, for an optimizer that needs whole tensors."""
    consistency: Optional[str] = None
    """By which rule its rounds end, as settings spell it; None: by the job's."""
    same_name: bool = False
    """Whether workers must not differ: the name says the parameter's place in the model. They are
    compared when all keys of the optimizer are declared (`StoreMade`)."""
    initial: Optional[SeededRows] = None
    """How servers make the initial value of a key of rows; None: worker rank 0 pushes it."""
    members: List[Member] = []  # noqa: RUF012  nobody changes it
    """The tensors of a bucket, in the order of its elements; of any other key none."""
    keeps_means: bool = False
    """Whether servers keep the mean gradient of the last round that has ended, and the optimizer's
    state before it."""

    def __post_init__(self) -> None:
        check_number("a store's number", self.store, 0, MAX_STORE)
        check_tensor(self.key, self.name, self.shape, self.dtype, self.layout)
        check_choice("a consistency", self.consistency or "")
        check_members(self.key, self.name, self.shape, self.members)


class DeclaredKey(Message, frozen=True):
    """A key as all processes know it.

    The scheduler's answer to DeclareKey. A worker passes it on to the servers that keep the key.
    """

    key_id: int
    key: Key
    shape: Tuple[int, ...]
    dtype: str
    runs: List[Tuple[int, int]]
    """How many of its elements each server keeps, as the job's placement has chosen."""
    name: Optional[str] = None
    """The parameter's name in all processes: that of the worker that declared it first."""
    layout: str = "dense"
    """Layout as in DeclareKey, like what follows."""
    codecs: CodecChoices = CodecChoices()
    store: int = 0
    whole: bool = False
    """Whether one server must keep all elements, for an optimizer that needs whole tensors."""
    consistency: Optional[str] = None
    initial: Optional[SeededRows] = None
    members: List[Member] = []  # noqa: RUF012  nobody changes it
    keeps_means: bool = False

    def __post_init__(self) -> None:
        check_choice("a consistency", self.consistency or "")
        check_number("a store's number", self.store, 0, MAX_STORE)
        check_number("a key's id", self.key_id, 0, MAX_KEY_ID)
        check_tensor(self.key, self.name, self.shape, self.dtype, self.layout)
        check_runs(called(self.key, self.name), self.shape, self.runs)
        check_members(self.key, self.name, self.shape, self.members)


def check_called(key: Key, name: Optional[str]) -> None:
    """Raises ProtocolError for a key or a parameter's name that is too long."""
    check(len(str(key)) <= MAX_KEY_CHARS, "a key has too many letters")
    check(len(name or "") <= MAX_KEY_CHARS, "a parameter's name has too many letters")


def check_tensor(
    key: Key, name: Optional[str], shape: Tuple[int, ...], dtype: str, layout: str
) -> None:
    check_called(key, name)
    what = called(key, name)
    check(dtype in DTYPES, f"{what} has dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    check_shape(what, shape)
    # Not with numpy, whose integers overflow.
    elems = math.prod(shape)
    check(elems <= MAX_KEY_ELEMS, f"{what} has {elems} elements; at most {MAX_KEY_ELEMS} may")
    check_name("a layout's name", layout)


def check_shape(what: str, shape: Sequence[int]) -> None:
    """Raises ProtocolError for a shape that no array can have."""
    check(len(shape) <= MAX_DIMENSIONS, f"{what} has too many dimensions")
    # Each on its own, too: their product is 0 if one of them is.
    allowed = all(0 <= extent <= MAX_KEY_ELEMS for extent in shape)
    check(allowed, f"{what} has the shape {shape}; an extent has at most {MAX_KEY_ELEMS} elements")


def check_members(
    key: Key, name: Optional[str], shape: Tuple[int, ...], members: Sequence[Member]
) -> None:
    """Raises ProtocolError for tensors that do not make up a bucket of this shape."""
    if not members:
        return
    what = called(key, name)
    check(1 < len(members) <= MAX_MEMBERS, f"{what} is a bucket of {len(members)} tensors")
    for member in members:
        check_called(member.key, member.name)
        check_shape(called(member.key, member.name), member.shape)
    elems = sum(member.size_elems for member in members)
    check(shape == (elems,), f"{what} has the shape {shape}, and its tensors {elems} elements")


def check_runs(what: str, shape: Tuple[int, ...], runs: List[Tuple[int, int]]) -> None:
    servers = {server for server, _ in runs}
    check(len(servers) == len(runs), f"{what} has several runs on a server")
    for server, length in runs:
        check_number("a rank", server, 0, MAX_RANK)
        check(length > 0, f"{what} has {length} elements on server {server}")
    elems = sum(length for _, length in runs)
    check(elems == math.prod(shape), f"{what} has {elems} elements for the shape {shape}")
