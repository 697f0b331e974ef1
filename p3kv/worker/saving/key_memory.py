"""Copies what the codec of a key's gradients remembers, as it is between two rounds."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Dict, List, Tuple

import numpy as np

from p3kv.codecs import Encoder, Part
from p3kv.errors import ConfigError
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DTYPES

Arrays = Dict[str, np.ndarray]


class MemoryCopy:
    """Copy of an encoder's memory of a key after a round, as far as it has encoded the round."""

    def __init__(self, memory: Arrays, round: int, missing_elems: int) -> None:
        self.round = round
        """Its newest one with a gradient, as far as known."""
        self.missing_elems = missing_elems
        self.complete: Future[Arrays] = Future()
        """Told the copy once nothing is missing."""
        self._memory = memory
        self._copy = {name: np.empty_like(array) for name, array in memory.items()}

    def take(self, offset: int, length: int) -> None:
        """Copies some elements, which are encoded for the round and not for a later one."""
        for name, array in self._memory.items():
            self._copy[name][offset : offset + length] = array[offset : offset + length]
        self.missing_elems -= length
        if not self.missing_elems and self.complete.set_running_or_notify_cancel():
            self.complete.set_result(self._copy)


class KeyMemory(Encoder):
    """Encodes gradients of a key in a job with checkpoints, where the codec's encoder remembers.

    A slice is encoded when it begins to leave. So when a checkpoint is due, some slices of its
    round are encoded and others are not, nor perhaps those of the round before. Each element is
    copied after it is encoded for the round and before it is encoded for the next. Nobody waits.

    Belongs to the worker's thread; `restore` comes before the first push.
    """

    def __init__(self, encoder: Encoder, called: str) -> None:
        """`called` is the key's name in messages. Raises ConfigError for arrays that checkpoints
        can't have."""
        super().__init__(encoder.codec)
        self._encoder = encoder
        self._memory = dict(encoder.memory())
        self._size_elems = encoder.codec.size_elems
        self._all_encoded = INITIAL_ROUND
        """The newest round of which every element is encoded, or has no gradient, as in all rounds
        before it."""
        self._open: Dict[int, List[Tuple[int, int]]] = {}
        """By later round: offset and length of what is encoded of it."""
        self._left: Dict[int, int] = {}
        """By later round: how many elements are still to be encoded."""
        self._copies: List[MemoryCopy] = []
        """That are not complete."""
        for name, array in self._memory.items():
            if array.shape != (self._size_elems,) or array.dtype.name not in DTYPES:
                raise ConfigError(
                    f"the codec of the gradients of {called} remembers {name!r}, of shape "
                    f"{array.shape} and dtype {array.dtype}; checkpoints need {self._size_elems} "
                    f"items, one for each element, of one of the dtypes {', '.join(DTYPES)}"
                )

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        count = self._encoder.encode(elements, part, out)
        length = len(elements)
        self._open.setdefault(part.round, []).append((part.offset, length))
        self._left[part.round] = self._left.get(part.round, self._size_elems) - length
        if self._copies:
            for copy in self._copies:
                if copy.round == part.round:
                    copy.take(part.offset, length)
            self._copies = [copy for copy in self._copies if copy.missing_elems]
        self._forget_complete()
        return count

    def use_momentum(self, momentum: float) -> None:
        self._encoder.use_momentum(momentum)

    def memory(self) -> Arrays:
        return self._memory

    def restore(self, arrays: Arrays) -> bool:
        """Takes back what the encoder has remembered; whether it is of the same kind."""
        if _kinds(arrays) != _kinds(self._memory):
            return False
        for name, array in arrays.items():
            self._memory[name][:] = array
        return True

    def push_without_gradient(self, round: int) -> None:
        """Takes note that nothing is to be encoded for a round."""
        self._left[round] = 0
        for copy in self._copies:
            if copy.round == round:
                self._take_what_is_there(copy)
        self._copies = [copy for copy in self._copies if copy.missing_elems]
        self._forget_complete()

    def begin_copy(self, round: int) -> MemoryCopy:
        """Begins a copy of what the encoder remembers after a round; before this worker pushes for
        any later one. It may be complete at once."""
        copy = MemoryCopy(self._memory, round, self._size_elems)
        self._take_what_is_there(copy)
        if copy.missing_elems:
            self._copies.append(copy)
        return copy

    def _take_what_is_there(self, copy: MemoryCopy) -> None:
        # Later rounds of which nothing is left have no gradient: the memory stays as it was.
        while copy.round > self._all_encoded and self._left.get(copy.round) == 0:
            copy.round -= 1
        if copy.round <= self._all_encoded:
            copy.take(0, self._size_elems)
            return
        for offset, length in self._open.get(copy.round, ()):
            copy.take(offset, length)

    def _forget_complete(self) -> None:
        while self._left.get(self._all_encoded + 1) == 0:
            self._all_encoded += 1
            del self._left[self._all_encoded]
            self._open.pop(self._all_encoded, None)


def _kinds(arrays: Arrays) -> Dict[str, Tuple[Tuple[int, ...], np.dtype]]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}
