"""Whether two sides call their parameters alike: two workers, or a checkpoint and a script."""

from __future__ import annotations

import re
from typing import Dict, NamedTuple, Optional, Sequence, Tuple, Union

_COUNTER = re.compile(r"(?:0|[1-9][0-9]*)(?![0-9])")
"""A number in a name. Zeros before it are text."""


class NamePair(NamedTuple):
    """Names that two sides give the parameter of a key."""

    key: Union[int, str]
    one: str
    other: str


def both(pairs: Sequence[NamePair], one: str, other: str) -> str:
    """In messages: what each of two sides has."""
    keys = ", ".join(repr(pair.key) for pair in pairs)
    return (
        f"{one} has {', '.join(repr(pair.one) for pair in pairs)} where {other} has "
        f"{', '.join(repr(pair.other) for pair in pairs)} ({'key' if len(pairs) == 1 else 'keys'} "
        f"{keys})"
    )


class SameNames:
    """Compares what two sides call the parameters of the same keys, one key after the other.

    Frameworks number what a script makes: `dense3_weight`, `net0_conv2_weight`. A script that has
    made something more before counts on, so the same network has other names. Names are the same
    here if they differ in their numbers only, and each counter by the same number for all keys: a
    counter is a number with all the text before it. Where a number of keys is its place among the
    sorted names, this holds exactly if both sides sort their parameters alike: `dense9` and
    `dense10` sort otherwise than `dense8` and `dense9`, and then no number fits all keys.
    """

    def __init__(self) -> None:
        self._shifts: Dict[str, Tuple[int, NamePair]] = {}
        """By counter: the shift, and the names that first had it."""
        self.shifted: Optional[NamePair] = None
        """The first names that differ by such a shift."""

    def contradiction(self, pair: NamePair) -> Sequence[NamePair]:
        """Takes the next key; returns the names that do not fit each other, or nothing."""
        texts, numbers = _parts(pair.one)
        other_texts, other_numbers = _parts(pair.other)
        if texts != other_texts:
            return [pair]
        counter = ""
        for text, number, other in zip(texts, numbers, other_numbers):
            counter += text + "\0"
            shift, first = self._shifts.setdefault(counter, (other - number, pair))
            if other - number != shift:
                return [first, pair]
            if shift and self.shifted is None:
                self.shifted = pair
        return []


def _parts(name: str) -> Tuple[Sequence[str], Sequence[int]]:
    """The text before each number and after the last, and the numbers."""
    return _COUNTER.split(name), [int(number) for number in _COUNTER.findall(name)]
