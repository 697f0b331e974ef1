"""Placement of each key on the servers, whichever worker declares the key first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, NoReturn, Optional, Set, Tuple, Union

from p3kv.common import words
from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.scheduler.membership import Node
from p3kv.scheduler.names import Names
from p3kv.scheduler.replies import JobFails, Replies
from p3kv.slicing import (
    PLACEMENTS,
    Layout,
    Placement,
    Run,
    Topology,
    checked,
    loads_with,
    make_layout,
)
from p3kv.wire.messages import (
    UNKNOWN,
    CodecChoices,
    DeclaredKey,
    DeclareKey,
    Failure,
    Key,
    KeyRefused,
    called,
)


@dataclass
class _Record:
    """A key, and the workers that have declared it."""

    key: DeclaredKey
    ranks: Set[int] = field(default_factory=set)


class Keys:
    """All keys that workers have declared, and what each server keeps of them."""

    def __init__(self, num_servers: int) -> None:
        self._placement: Optional[Placement] = None
        self._placed_by = ""
        self._keys: Dict[Tuple[int, Key], _Record] = {}
        """By the store's number and the key."""
        self.names = Names()
        self._loads_elems = [0] * num_servers
        self.sliced_elems = 0
        """Elements of all keys that travel in slices, and not by touched rows."""

    def choose_placement(self, node: Node, chosen: str) -> None:
        """A worker chooses the placement; raises JobFails for one that is not registered here."""
        if chosen == self._placed_by:
            return
        try:
            self._placement = PLACEMENTS.make(chosen)
        except ConfigError as error:
            failure = Failure(str(error), "worker", node.rank, error="ConfigError")
            raise JobFails(failure) from error
        self._placed_by = chosen

    def declare(
        self, node: Node, message: DeclareKey, slice_size: int, topology: Topology
    ) -> Replies:
        """A worker declares a key; raises JobFails where it contradicts another worker's."""
        record = self._keys.get((message.store, message.key))
        if record is None:
            record = _Record(self._place(node, message, slice_size, topology))
            self._keys[message.store, message.key] = record
        if node.rank in record.ranks:
            _refuse(
                node,
                f"{called(message.key, message.name)} was declared before by worker {node.rank}",
            )
        first = record.key
        if first.consistency != message.consistency:
            _refuse(
                node,
                f"workers disagree on the consistency of {called(message.key, first.name)}: worker "
                f"{min(record.ranks)} has {_rule_of(first)}, worker {node.rank} has "
                f"{_rule_of(message)}",
                "All workers must make the same stores, each with the same consistency.",
            )
        if _declared_as(first) != _declared_as(message):
            reason = (
                f"workers disagree on {called(message.key, first.name)}: worker "
                f"{min(record.ranks)} has {_declared_as(first)}, worker {node.rank} has "
                f"{_declared_as(message)}"
            )
            hint = (
                "All workers must build the same model with the same parameter names, and have the "
                "same settings and codecs."
            )
            _refuse(node, reason, hint)
        if first.whole != message.whole:
            needs, needs_not = min(record.ranks), node.rank
            if message.whole:
                needs, needs_not = needs_not, needs
            _refuse(
                node,
                f"workers disagree on {called(message.key, first.name)}: worker {needs} has an "
                "optimizer that needs the whole tensor on one server, and worker "
                f"{needs_not} has none when it declares the key",
                "All workers must set the same optimizer before they declare keys.",
            )
        contradiction = self.names.contradiction(node.rank, message)
        if contradiction is not None:
            ways = ["Make the same layers in the same order on all workers"]
            ways += filter(None, [words.current().same_names])
            _refuse(node, contradiction, ", or ".join(ways))
        record.ranks.add(node.rank)
        return [(node.identity, record.key)]

    def _place(
        self, node: Node, message: DeclareKey, slice_size: int, topology: Topology
    ) -> DeclaredKey:
        try:
            layout = make_layout(message.layout, message.shape)
            layout.check_slices([(0, layout.size_elems)], slice_size)
        except ConfigError as error:
            failure = Failure(str(error), "worker", node.rank, error="ConfigError")
            raise JobFails(failure) from error
        except ProtocolError as error:
            _refuse(node, f"{called(message.key, message.name)}: {error}")
        runs = self._runs(message, layout, layout.full_slice_elems(slice_size), topology)
        self._loads_elems = loads_with(self._loads_elems, runs)
        self.sliced_elems += 0 if layout.touched_only else layout.size_elems
        return DeclaredKey(
            len(self._keys), message.key, message.shape, message.dtype, runs, message.name,
            message.layout, message.codecs, message.store, message.whole, message.consistency,
        )  # fmt: skip

    def _runs(
        self, message: DeclareKey, layout: Layout, slice_size: int, topology: Topology
    ) -> List[Run]:
        assert self._placement is not None
        if message.whole:
            slice_size = max(layout.grain_elems, layout.size_elems)
        loads_elems = list(self._loads_elems)
        try:
            runs = self._placement.place(layout, slice_size, loads_elems, topology)
            return checked(runs, layout, len(loads_elems), message.whole)
        except Exception as error:
            # The placement may be a user's own.
            reason = (
                f"the placement {self._placed_by!r} failed for "
                f"{called(message.key, message.name)}: {in_one_line(error)}"
            )
            raise JobFails(Failure(reason, "scheduler", UNKNOWN, error="ConfigError")) from error


def _declared_as(key: Union[DeclaredKey, DeclareKey]) -> str:
    """Words for what all workers must declare of a key."""
    words = f"shape {key.shape} and dtype {key.dtype} (layout {key.layout})"
    if key.codecs != CodecChoices():
        words += f", codecs {key.codecs.gradients} for gradients and {key.codecs.values} for values"
    return words


def _rule_of(key: Union[DeclaredKey, DeclareKey]) -> str:
    return "the job's" if key.consistency is None else f"'{key.consistency}'"


def _refuse(node: Node, reason: str, hint: str = "") -> NoReturn:
    failure = Failure(reason, "worker", node.rank, error="KeyMismatchError", hint=hint)
    raise JobFails(failure, (node.identity, KeyRefused(failure.words)))
