"""Whether all workers mean the same parameter by a key, as far as names tell."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, DefaultDict, Dict, Optional, Tuple

from p3kv.common.naming import Pair, SameNames, both
from p3kv.wire.messages import DeclareKey, Key

_FIRST = 0
"""All workers' names are compared with those of the worker of this rank."""


class Names:
    """Compares what workers call their parameters, whichever worker declares a key first.

    A key has a value only when worker rank 0 has declared it, so nothing is updated whose names
    were not compared. Scripts that declare keys by themselves may have no names.
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
        """Takes a worker's name of a key; returns which names of two workers do not fit."""
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
            found = compared.contradiction(Pair(message.key, self._firsts[key], name))
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
