"""Which server keeps which part of each key, whichever worker declares the key first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Dict, List, NoReturn, Optional, Set, Tuple

from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.scheduler.membership import Membership, Node
from p3kv.scheduler.replies import JobFails, Replies
from p3kv.slicing import PLACEMENTS, Placement, Run, check_count, checked, loads_with
from p3kv.wire.messages import (
    UNKNOWN,
    DeclareKey,
    Failure,
    Key,
    KeyCodecNames,
    KeyDeclared,
    KeyRefused,
    called,
)


@dataclass
class _DeclaredKey:
    key_id: int
    runs: List[Run]
    message: DeclareKey
    ranks: Set[int] = field(default_factory=set)


class Keys:
    """All keys that workers have declared, and what each server keeps of them."""

    def __init__(self, members: Membership, num_servers: int) -> None:
        self._members = members
        self._placement: Optional[Placement] = None
        self._placed_by = ""
        self._keys: Dict[Tuple[int, Key], _DeclaredKey] = {}
        """By the store's number and the key."""
        self._loads_elems = [0] * num_servers

    def choose_placement(self, node: Node, name: str) -> None:
        """A worker names the placement; raises JobFails for a name that is not registered here."""
        if name == self._placed_by:
            return
        try:
            self._placement = PLACEMENTS.find(name)()
        except ConfigError as error:
            failure = Failure(str(error), "worker", node.rank, error="ConfigError")
            raise JobFails(failure) from error
        self._placed_by = name

    def declare(self, node: Node, message: DeclareKey, slice_size: int) -> Replies:
        """A worker declares a key; raises JobFails where it contradicts another worker's."""
        declared = self._keys.get((message.store, message.key))
        if declared is None:
            declared = self._place(node, message, slice_size)
        if node.rank in declared.ranks:
            _refuse(
                node,
                f"{called(message.key, message.name)} was declared before by worker {node.rank}",
            )
        first = declared.message
        if _declared_as(first) != _declared_as(message):
            reason = (
                f"workers disagree on {called(message.key, first.name)}: worker "
                f"{min(declared.ranks)} has {_declared_as(first)}, worker {node.rank} has "
                f"{_declared_as(message)}"
            )
            hint = (
                "All workers must build the same model with the same parameter names, and have the "
                "same settings."
            )
            _refuse(node, reason, hint)
        declared.ranks.add(node.rank)
        return [(node.identity, KeyDeclared(declared.key_id, declared.runs, first.name))]

    def _place(self, node: Node, message: DeclareKey, slice_size: int) -> _DeclaredKey:
        size_elems = math.prod(message.shape)
        try:
            check_count([(0, size_elems)], slice_size)
        except ProtocolError as error:
            _refuse(node, f"key {message.key!r}: {error}")
        runs = self._runs(message, size_elems, slice_size)
        self._loads_elems = loads_with(self._loads_elems, runs)
        declared = _DeclaredKey(len(self._keys), runs, message)
        self._keys[message.store, message.key] = declared
        return declared

    def _runs(self, message: DeclareKey, size_elems: int, slice_size: int) -> List[Run]:
        assert self._placement is not None
        loads_elems = list(self._loads_elems)
        hosts = [server.hello.host for server in self._members.role("server")]
        try:
            runs = self._placement.place(size_elems, slice_size, loads_elems, hosts)
            return checked(runs, size_elems, len(loads_elems))
        except Exception as error:
            # The placement may be a user's own.
            reason = (
                f"the placement {self._placed_by!r} failed for "
                f"{called(message.key, message.name)}: {in_one_line(error)}"
            )
            raise JobFails(Failure(reason, "scheduler", UNKNOWN, error="ConfigError")) from error


def _declared_as(message: DeclareKey) -> str:
    """What all workers must declare of a key, in words."""
    words = f"shape {message.shape} and dtype {message.dtype}"
    codecs = message.codecs
    if codecs != KeyCodecNames():
        words += f" (codec of gradients {codecs.gradients!r}, of values {codecs.values!r})"
    return words


def _refuse(node: Node, reason: str, hint: str = "") -> NoReturn:
    failure = Failure(reason, "worker", node.rank, error="KeyMismatchError", hint=hint)
    raise JobFails(failure, (node.identity, KeyRefused(failure.words)))
