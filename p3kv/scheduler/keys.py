"""Where keys are: each has one number and one place, whichever worker declares it first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Dict, List, NoReturn, Set

from p3kv.errors import ProtocolError
from p3kv.scheduler.membership import Node
from p3kv.scheduler.replies import JobFails, Replies
from p3kv.slicing import Run, check_count, loads_with, place
from p3kv.wire.messages import DeclareKey, Failure, Key, KeyDeclared, KeyRefused, called


@dataclass
class _DeclaredKey:
    key_id: int
    runs: List[Run]
    message: DeclareKey
    ranks: Set[int] = field(default_factory=set)


class Keys:
    """All keys that workers have declared, and what each server keeps of them."""

    def __init__(self, num_servers: int) -> None:
        self._keys: Dict[Key, _DeclaredKey] = {}
        self._loads_elems = [0] * num_servers

    def declare(self, node: Node, message: DeclareKey, slice_size: int) -> Replies:
        """A worker declares a key; raises JobFails where it contradicts another worker's."""
        declared = self._keys.get(message.key)
        if declared is None:
            declared = self._place(node, message, slice_size)
        if node.rank in declared.ranks:
            _refuse(
                node,
                f"{called(message.key, message.name)} was declared before by worker {node.rank}",
            )
        first = declared.message
        if (first.shape, first.dtype) != (message.shape, message.dtype):
            other = min(declared.ranks)
            reason = (
                f"workers disagree on {called(message.key, first.name)}: worker {other} has shape "
                f"{first.shape} and dtype {first.dtype}, worker {node.rank} has shape "
                f"{message.shape} and dtype {message.dtype}"
            )
            hint = "All workers must build the same model with the same parameter names."
            _refuse(node, reason, hint)
        declared.ranks.add(node.rank)
        return [(node.identity, KeyDeclared(declared.key_id, declared.runs, first.name))]

    def _place(self, node: Node, message: DeclareKey, slice_size: int) -> _DeclaredKey:
        size_elems = math.prod(message.shape)
        try:
            check_count([(0, size_elems)], slice_size)
        except ProtocolError as error:
            _refuse(node, f"key {message.key!r}: {error}")
        runs = place(size_elems, slice_size, self._loads_elems)
        self._loads_elems = loads_with(self._loads_elems, runs)
        declared = _DeclaredKey(len(self._keys), runs, message)
        self._keys[message.key] = declared
        return declared


def _refuse(node: Node, reason: str, hint: str = "") -> NoReturn:
    failure = Failure(reason, "worker", node.rank, error="KeyMismatchError", hint=hint)
    raise JobFails(failure, (node.identity, KeyRefused(failure.words)))
