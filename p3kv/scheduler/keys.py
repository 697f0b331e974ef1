"""Placement of each key on the servers, and whether all workers mean the same by a key."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Collection, DefaultDict, Dict, List, NoReturn, Optional, Set, Tuple, Union

from p3kv.common import words
from p3kv.common.naming import NamePair, SameNames, both
from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.scheduler.membership import JobFails, Node, Replies
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
    StoreMade,
    called,
)

_FIRST = 0
"""All workers' names are compared with those of the worker of this rank."""


class Names:
    """Compares workers' names of parameters, whichever worker declares a key first.

    A key has no value before worker rank 0 has declared it, so nothing is updated whose names were
    not compared. Scripts that declare keys by themselves may have no names.
    """

    def __init__(self) -> None:
        self._firsts: Dict[Tuple[int, Key], str] = {}
        """Worker rank 0's names, by the store's number and the key."""
        self._early: DefaultDict[Tuple[int, Key], Dict[int, str]] = defaultdict(dict)
        """The others' names of keys that it has not declared yet, by rank."""
        self._compared: DefaultDict[Tuple[int, int], SameNames] = defaultdict(SameNames)
        """By the store's number and the other worker's rank."""
        self._shift: Optional[str] = None
        self._told = False

    def contradiction(self, rank: int, message: DeclareKey) -> Optional[str]:
        """Compare a worker's name of a key; return which names of two workers do not fit."""
        if message.name is None:
            return None
        key = (message.store, message.key)
        if rank == _FIRST:
            self._firsts[key] = message.name
            others = self._early.pop(key, {})
        elif key in self._firsts:
            others = {rank: message.name}
        else:
            self._early[key][rank] = message.name
            others = {}
        for other, name in others.items():
            compared = self._compared[message.store, other]
            found = compared.contradiction(NamePair(message.key, self._firsts[key], name))
            if found:
                return (
                    "workers disagree on the parameters by more than a shift of the counters in "
                    f"their names: {both(found, *_sides(other))}"
                )
            if compared.shifted is not None and not self._told:
                self._told = True
                self._shift = (
                    f"{both([compared.shifted], *_sides(other))}: the scripts have not made the "
                    "same layers before. Nothing is wrong as long as such a counter differs by the "
                    "same number in all names; where it does not, the job ends"
                )
        return None

    def forget(self, store: int) -> None:
        """No worker has a store's keys any more."""
        tables: Tuple[Dict[Any, Any], ...] = (self._firsts, self._early, self._compared)
        for table in tables:
            for one in [one for one in table if one[0] == store]:
                del table[one]

    def shift(self) -> Optional[str]:
        """Warning of workers whose counters differ, once in a job."""
        told, self._shift = self._shift, None
        return told


def _sides(other: int) -> Tuple[str, str]:
    return f"worker {_FIRST}", f"worker {other}"


@dataclass
class _Record:
    """A key, and the workers that have declared it."""

    key: DeclaredKey
    ranks: Set[int] = field(default_factory=set)
    other_names: Dict[int, str] = field(default_factory=dict)
    """By rank, where a worker calls the parameter otherwise."""


@dataclass
class _Made:
    """An optimizer of a store as the first worker has made it, and the workers that have."""

    first: StoreMade
    ranks: List[int]


class Keys:
    """All keys that workers have declared, and what each server keeps of them."""

    def __init__(self, num_servers: int) -> None:
        self._placement: Optional[Placement] = None
        self._placed_by = ""
        self._keys: Dict[Tuple[int, Key], _Record] = {}
        """By the store's number and the key."""
        self._forgotten: DefaultDict[int, Set[int]] = defaultdict(set)
        """By the store's number, the workers that need its keys no more."""
        self._num_keys = 0
        """How many there have been: their ids."""
        self._made: DefaultDict[int, List[_Made]] = defaultdict(list)
        """By the store's number."""
        self.names = Names()
        self._loads_elems = [0] * num_servers
        self.sliced_elems = 0
        """Elements of all keys that travel in slices, and not by touched rows."""

    def choose_placement(self, node: Node, chosen: str) -> None:
        """Choose the placement; JobFails for one that is not registered here."""
        if chosen == self._placed_by:
            return
        try:
            self._placement = PLACEMENTS.make(chosen)
        except ConfigError as error:
            raise JobFails.at(node, str(error), "ConfigError") from error
        self._placed_by = chosen

    def declare(
        self, node: Node, message: DeclareKey, slice_size: int, topology: Topology
    ) -> Replies:
        """Declare a worker's key; JobFails where it contradicts another worker's."""
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
        difference = _difference(first, min(record.ranks, default=0), message, node.rank)
        if difference:
            _refuse(node, f"workers disagree on the model: {difference}", _SAME_MODEL)
        if first.consistency != message.consistency:
            _refuse(
                node,
                f"workers disagree on the consistency of {called(message.key, first.name)}: worker "
                f"{min(record.ranks)} has {_rule_of(first)}, worker {node.rank} has "
                f"{_rule_of(message)}",
                "All workers must choose the same consistency for the same parameters.",
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
                "All workers must use the same optimizer, from the beginning.",
            )
        contradiction = None
        if not message.same_name:
            contradiction = self.names.contradiction(node.rank, message)
        if contradiction is not None:
            ways = ["Make the same layers in the same order on all workers"]
            ways += filter(None, [words.current().same_names])
            _refuse(node, contradiction, ", or ".join(ways))
        record.ranks.add(node.rank)
        if message.name is not None and message.name != first.name:
            record.other_names[node.rank] = message.name
        return [(node.identity, record.key)]

    def made(self, node: Node, message: StoreMade) -> Replies:
        """Note a store's optimizer on a worker; JobFails if another worker's is not like it."""
        made = next((one for one in self._made[message.store] if node.rank not in one.ranks), None)
        if made is None:
            self._made[message.store].append(_Made(message, [node.rank]))
            return []
        first, other = made.first, made.ranks[0]
        made.ranks.append(node.rank)
        for what in sorted({*first.uses, *message.uses}):
            mine, theirs = message.uses.get(what, "none"), first.uses.get(what, "none")
            if mine != theirs:
                reason = (
                    f"workers disagree on {what}: worker {other} has {theirs}, worker {node.rank} "
                    f"has {mine}"
                )
                hint = "All workers must make their optimizers with the same arguments."
                raise JobFails.at(node, reason, "ConfigError", hint)
        differences = self._differences(message, other, node.rank)
        if message.parameters != first.parameters:
            counts = (
                f"worker {other}'s optimizer has {first.parameters} parameters, worker "
                f"{node.rank}'s has {message.parameters}"
            )
            differences.insert(0, counts)
        if differences:
            reason = f"workers disagree on the model: {', and '.join(differences)}"
            raise JobFails.at(node, reason, "KeyMismatchError", _SAME_MODEL)
        return []

    def forget(self, node: Node, store: int, staying: Collection[int]) -> Replies:
        """Forget a store's keys on a worker; servers have room again once no staying worker has
        them."""
        self._forgotten[store].add(node.rank)
        if not self._forgotten[store].issuperset(staying):
            return []
        for key in [key for its_store, key in self._keys if its_store == store]:
            declared = self._keys.pop((store, key)).key
            for server, elems in declared.runs:
                self._loads_elems[server] -= elems
            if not make_layout(declared.layout, declared.shape).touched_only:
                self.sliced_elems -= sum(elems for _, elems in declared.runs)
        self.names.forget(store)
        self._made.pop(store, None)
        return []

    def _differences(self, message: StoreMade, one: int, other: int) -> List[str]:
        """Name the first parameter of a store in which two workers differ; empty if they may."""
        records = self._keys.items() if message.same_names else ()
        for (store, key), record in records:
            if store != message.store:
                continue
            has = [rank in record.ranks for rank in (one, other)]
            names = [record.other_names.get(rank, record.key.name) for rank in (one, other)]
            if has[0] != has[1]:
                lacks, at = (other, 0) if has[0] else (one, 1)
                shape = tuple(record.key.shape)
                return [f"worker {lacks} has no '{names[at]}' of shape {shape} (key {key})"]
            if has[0] and names[0] != names[1]:
                return [
                    f"key {key} is '{names[0]}' on worker {one}, and '{names[1]}' on worker {other}"
                ]
        return []

    def _place(
        self, node: Node, message: DeclareKey, slice_size: int, topology: Topology
    ) -> DeclaredKey:
        try:
            layout = make_layout(message.layout, message.shape)
            layout.check_slices([(0, layout.size_elems)], slice_size)
        except ConfigError as error:
            raise JobFails.at(node, str(error), "ConfigError") from error
        except ProtocolError as error:
            _refuse(node, f"{called(message.key, message.name)}: {error}")
        runs = self._runs(message, layout, layout.full_slice_elems(slice_size), topology)
        self._loads_elems = loads_with(self._loads_elems, runs)
        self.sliced_elems += 0 if layout.touched_only else layout.size_elems
        self._num_keys += 1
        return DeclaredKey(
            self._num_keys - 1, message.key, message.shape, message.dtype, runs, message.name,
            message.layout, message.codecs, message.store, message.whole, message.consistency,
            message.initial, message.members, message.keeps_means,
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


_SAME_MODEL = (
    "All workers must build the same model, with the same layers in the same order, and give all "
    "its parameters to the optimizer."
)


def _difference(first: DeclaredKey, other: int, message: DeclareKey, rank: int) -> Optional[str]:
    """The first tensor of a bucket in which two workers differ, in words; None if they do not."""
    for theirs, mine in zip_longest(first.members, message.members):
        if theirs is None or mine is None:
            lacks, one = (other, mine) if theirs is None else (rank, theirs)
            return f"worker {lacks} has no '{one.name}' of shape {one.shape} (key {one.key})"
        if theirs != mine:
            has = [
                f"worker {its} has '{one.name}' of shape {one.shape} (key {one.key})"
                for its, one in ((other, theirs), (rank, mine))
            ]
            return ", and ".join(has)
    return None


def _declared_as(key: Union[DeclaredKey, DeclareKey]) -> str:
    """Words for what all workers must declare of a key."""
    words = f"shape {key.shape} and dtype {key.dtype} (layout {key.layout})"
    if key.codecs != CodecChoices():
        words += f", codecs {key.codecs.gradients} for gradients and {key.codecs.values} for values"
    if key.initial is not None:
        words += f", initial rows by {key.initial}"
    return words


def _rule_of(key: Union[DeclaredKey, DeclareKey]) -> str:
    return "the job's" if key.consistency is None else f"'{key.consistency}'"


def _refuse(node: Node, reason: str, hint: str = "") -> NoReturn:
    failure = Failure(reason, "worker", node.rank, error="KeyMismatchError", hint=hint)
    raise JobFails(failure, (node.identity, KeyRefused(failure.words)))
