"""A consistency rule of a user's own: a worker goes on with a value that lacks the last round.

So a worker is one round ahead of a straggler before it waits (stale-synchronous, with a staleness
of one).
"""

from p3kv.consistency import CONSISTENCIES, Consistency


class OneBehind(Consistency):
    """As bulk-synchronous, one round more may be open than workers wait for."""

    window = 3

    def needs(self, round: int) -> int:
        return round - 1


CONSISTENCIES.register("one_behind", OneBehind)
