"""What a consistency rule answers, and the table from which a job chooses one by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Collection, List, Optional

from p3kv.common.registry import Registry
from p3kv.errors import ConfigError, in_one_line

_CHECKED_ROUNDS = 100
"""Rounds for which a new rule is asked before it is used."""


class Consistency(ABC):
    """Decides when a round of a key ends, and which value lets a worker go on.

    Every worker and every server makes one object, with the number of workers. All objects must
    answer alike, so an answer depends on the arguments and on nothing else. Round 0, in which
    worker rank 0 alone gives the initial value, ends without the rule.
    """

    window = 2
    """How many rounds of a key may be open, at least 1. A worker pushes for a round only when the
    one `window` before has ended on all servers of the key. So no worker is further ahead, and this
    bounds a server's memory."""

    own_rounds = False
    """Whether each worker's rounds of a key are its own, after the initial one. Then each push is a
    round by itself, that ends when the server has updated the value with it: at once, but in the
    order of this worker's rounds. Only `window` is asked then. This needs an optimizer on the
    servers. Slices of such a key keep the job's first size: no round comes for all workers alike,
    from which another size could hold."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    @abstractmethod
    def needs(self, round: int) -> int:
        """The round whose value, or that of a later one, lets a worker go on after its push for
        `round`; also the oldest that answers its pulls.

        Never later than `round`: that one might not end before the worker goes on. A server that
        has the value already answers at once. Without an optimizer on the servers a value is the
        sum of one round, and workers always wait for that of their own.
        """

    def ends(self, arrived: Collection[int]) -> bool:
        """Whether a round ends now that the pushes of these ranks have arrived.

        Each worker pushes in every round. A push after its round's end is refused as sent twice.
        """
        return len(arrived) == self.num_workers

    def missing(self, arrived: Collection[int]) -> List[int]:
        """The ranks for whose pushes a round still waits; none when it ends."""
        return [rank for rank in range(self.num_workers) if rank not in arrived]


CONSISTENCIES: Registry[Consistency] = Registry(
    "consistency", "every worker and server", "P3KV_CONSISTENCY"
)
"""Consistency rules by name."""


def consistency_of_key(name: Optional[str], of_job: Consistency) -> Consistency:
    """The rule that a key was declared with: that of the job (None), or another by its name.

    Raises ConfigError for a name that is not known, and for a rule whose rounds workers share: all
    keys with such rounds have the job's rule, since slice sizes change by it.
    """
    if name is None:
        return of_job
    rule = make_consistency(name, of_job.num_workers)
    if not rule.own_rounds:
        raise ConfigError(
            f"a key can't have the consistency {name!r}: set P3KV_CONSISTENCY for the whole job"
        )
    return rule


def make_consistency(name: str, num_workers: int) -> Consistency:
    """Makes the rule with this name; ConfigError if there is none, or if it can't be right."""
    member = CONSISTENCIES.find(name)
    try:
        rule = member(num_workers)
        needed = {round_: rule.needs(round_) for round_ in range(1, _CHECKED_ROUNDS)}
    except Exception as error:
        # It may be a user's own.
        raise ConfigError(f"the consistency {name!r} failed: {in_one_line(error)}") from error
    if not isinstance(rule.window, int) or rule.window < 1:
        raise ConfigError(
            f"the consistency {name!r} has a window of {rule.window!r}; it must be a whole number "
            "from 1 on"
        )
    for round_, needs in needed.items():
        if not isinstance(needs, int) or needs > round_:
            raise ConfigError(
                f"the consistency {name!r} says that round {round_} needs the value of round "
                f"{needs!r}; it must be a whole number, at most the round itself"
            )
    return rule
