"""A slice on its server: its value, and what has arrived of the rounds that are not complete."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

import numpy as np

from p3kv.codecs import KeyCodecs
from p3kv.server.buffers import Buffer, BufferPool
from p3kv.server.own_rounds import OwnRounds
from p3kv.wire.header import ENCODED, INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, called

_BYTE = np.dtype(np.uint8)
_HALF = np.dtype(np.float16)


@dataclass
class Round:
    """What has arrived of one slice in one round."""

    round: int
    """As workers count it."""
    early: bool
    """Whether a worker that has pushed for it may go on with an older value."""
    arrived: Set[int] = field(default_factory=set)
    wanting: List[int] = field(default_factory=list)
    """Ranks that asked for a result with their push, and have not been sent any."""
    others: List[int] = field(default_factory=list)
    """Ranks that want to know that the round has ended, and whose results do not tell them."""
    total: Optional[Buffer] = None
    by_rank: Dict[int, Buffer] = field(default_factory=dict)
    """The pushes, kept until all have arrived; only in deterministic mode."""
    host_sums: Set[int] = field(default_factory=set)
    """Ranks of the workers that will send the sum of their host's workers."""
    step: int = 0
    """The step in which worker rank 0 pushed; until it has, that of the first push."""
    priority: int = 0
    since_s: float = field(default_factory=time.monotonic)
    """When the first push arrived, on the monotonic clock."""
    ready_s: Dict[int, float] = field(default_factory=dict)
    """By rank, when the gradients were ready that have arrived; kept by `Lateness`."""
    lacks_gradient: bool = False
    """Whether a worker, or all of a host, has said that it has no gradient."""


@dataclass
class Result:
    """A slice's value for workers that have pushed for a round."""

    state: SliceState
    value: Buffer
    """The round's value, or an older one with which they may go on."""
    round: int
    step: int
    priority: int
    wanting: List[int]
    others: List[int]
    no_gradient: bool = False
    """Whether no worker had a gradient in the round, so that nothing has changed."""


class SliceState:
    """One slice on its server: its value, and the rounds that are not complete yet."""

    def __init__(
        self,
        key: DeclaredKey,
        index: int,
        length: int,
        codecs: KeyCodecs,
        offset: int = 0,
        first_round: int = INITIAL_ROUND,
        own_rounds: bool = False,
    ) -> None:
        self.key = key
        self.index = index
        self.length = length
        self.codecs = codecs
        """The key's codecs, for all its slices."""
        self.offset = offset
        """The slice's first element among those that this server keeps of the key."""
        self.first_round = first_round
        """The first round that has slices of this size."""
        self.of_key: Dict[int, SliceState] = {index: self}
        """All slices of this size that the server keeps of the key, by index, in the order of their
        elements."""
        self.dtype = np.dtype(key.dtype)
        self.half = self.dtype == _HALF
        """Whether its gradients are half-precision numbers, whose sums are single-precision."""
        self.value: Optional[Buffer] = None
        self.round = INITIAL_ROUND - 1
        """The last round whose result the value is. If rounds are each worker's own, it counts
        those of all workers."""
        self.ready_s: Dict[int, float] = {}
        """By rank, when the gradients of the value's round were ready; for those that are known."""
        self.open_rounds: Dict[int, Round] = {}
        self.own: Optional[OwnRounds[Round]] = OwnRounds() if own_rounds else None
        """Where rounds are each worker's own: those after the initial one, until they end."""
        self._wire: Optional[Tuple[Buffer, memoryview]] = None
        """The value as its codec has encoded it."""
        self.early_rounds: Set[int] = set()
        """Open rounds of which somebody waits for a result, and an older value may do."""

    @property
    def called(self) -> str:
        """The key's name in messages to users."""
        return called(self.key.key, self.key.name)

    def wire(self, pool: BufferPool) -> Tuple[Buffer, memoryview, int]:
        """How the value travels: a buffer that stays until it is sent, its bytes, and flags.

        A value is encoded once, when the first worker wants it.
        """
        assert self.value is not None
        codec = self.codecs.values
        if codec.in_place or self.round == INITIAL_ROUND:
            return self.value, self.value.bytes, 0
        if self._wire is None:
            buffer = pool.get(codec.most_bytes(self.length), _BYTE)
            count = codec.encode(self.value.array, self.offset, buffer.bytes)
            self._wire = buffer, buffer.bytes[:count]
        return (*self._wire, ENCODED)

    def forget_wire(self) -> None:
        """To be called when the value changes."""
        if self._wire is not None:
            self._wire[0].retire()
            self._wire = None

    def name(self) -> str:
        """The slice's name in messages."""
        return f"{self.called}, slice {self.index}"
