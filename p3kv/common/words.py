"""Words of a framework's scripts, for messages of modules that know no framework."""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass
from difflib import get_close_matches
from typing import Dict, Iterable, Sequence


@dataclass(frozen=True)
class Words:
    """Parts of sentences, filled in by a front end. An empty one does not apply to its framework.

    The words of several front ends are joined by "or" where a process has imported none of their
    frameworks, as the scheduler, or several.
    """

    use_store: str = ""
    """Question whether the script uses the store: "Does its script import p3kv, and use ...?"."""
    create_store: str = ""
    """All ways to create the store: "Write ..."."""
    first_use: str = ""
    """Call that joins the job: "Call p3kv.configure before the first ..."."""
    declare_key: str = ""
    """Call that makes a key known: "Initialise it with ... first"."""
    same_names: str = ""
    """How parameters match though a script makes something else before: "Make the same layers, or
    ..."."""
    synchronous: str = ""
    """How to have the gradients of all workers in one update: "use another optimizer, or ..."."""
    set_optimizer: str = ""
    """Call that has servers update: "Call ... on every worker first"."""
    servers_update: str = ""
    """Each way to have servers update: "let the servers update: ..."."""
    workers_update: str = ""
    """Each way to have workers update: "run the optimizer on the workers: ..."."""
    clip_on_workers: str = ""
    """How to clip where workers update: "clip the sums on the workers: ..."."""
    clip_own: str = ""
    """How a worker that updates its own weights clips: "clip each worker's own gradients ..."."""
    synchronise: str = ""
    """Call that gives a worker the servers' own values: "until ... is called"."""
    later_engine: str = ""
    """How to have operations complete later than they are called: "set ..."."""
    own: str = ""
    """What the framework has itself for synchronous training: "with ... a step would take"."""
    native_store: str = ""
    """A store of the framework's own that speaks ZeroMQ: "Very likely that of ..."."""
    native_roles: str = ""
    """When the framework takes roles over, and what then runs: "Where ..."."""


def counted(number: int, thing: str) -> str:
    """A number of things: "1 server", "2 servers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


_ALIKE = 0.54
"""How much of two names must be alike: as much as of fp16 and float16, more than of sync and
asynchronous."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """After a name that there is not: "; did you mean 'topk'?", or nothing where none is alike."""
    names, word = list(known), word.lower()
    begin = [name for name in names if word and name.lower().startswith(word)]
    nearest = begin or get_close_matches(word, names, 1, _ALIKE)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


_MOST_NAMES = 6


def some_of(names: Sequence[str]) -> str:
    """The first few of many names: "a, b and 4 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


_front_ends: Dict[str, Words] = {}
"""By the package of the framework."""


def add(framework: str, words: Words) -> None:
    """Takes the words of a framework's front end; before the process takes its role."""
    _front_ends[framework] = words


def current() -> Words:
    """The words for messages of this process: those of the frameworks that it has imported, or of
    all where it has imported none."""
    imported = [words for framework, words in _front_ends.items() if framework in sys.modules]
    columns = zip(*map(astuple, imported or _front_ends.values()))
    return Words(*(" or ".join(filter(None, column)) for column in columns))
