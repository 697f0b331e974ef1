"""Instructions for the processes of a trial: which store to use, and for how many steps."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, Tuple

from p3kv.errors import ConfigError

ALONE = "alone"
"""No store: each worker computes, and nothing is sent."""
NATIVE = "native"
"""The framework's own synchronous store, with its own servers."""
FIFO = "fifo"
"""p3kv, first in first out."""
P3KV = "p3kv"

_STORES = (ALONE, NATIVE, FIFO, P3KV)


_UNKNOWN = "-"


class Trial(NamedTuple):
    """One trial. `steps` are measured, after `warm_up` steps that are not."""

    store: str
    warm_up: int
    steps: int
    front_end: str = ""
    """The script's, as the first trial has told; empty in that one. Whose own store runs."""
    codecs: Tuple[str, str] = ("", "")
    """By which gradients and values travel; empty: as the settings say. They have no spaces."""

    @property
    def runs_p3kv(self) -> bool:
        """Whether the job's servers and scheduler are p3kv's."""
        return self.store in (FIFO, P3KV)

    @property
    def last_step(self) -> int:
        """The number, from 1, of the step whose first gradient ends the last measured step."""
        return self.warm_up + self.steps + 1

    def __str__(self) -> str:
        return " ".join(
            [
                self.store, str(self.warm_up), str(self.steps), self.front_end or _UNKNOWN,
                *filter(None, self.codecs),
            ]
        )  # fmt: skip

    @classmethod
    def parsed(cls, variable: str, text: str) -> Trial:
        """The trial that `str` has written; ConfigError for anything else."""
        with suppress(ValueError):
            store, warm_up, steps, front_end, *codecs = text.split()
            front_end = "" if front_end == _UNKNOWN else front_end
            if store in _STORES and len(codecs) in (0, 2):
                gradients, values = codecs or ("", "")
                return cls(store, int(warm_up), int(steps), front_end, (gradients, values))
        raise ConfigError(
            f"{variable} is '{text}'; only 'p3kv compare' and 'p3kv tune' set it: unset it"
        )
