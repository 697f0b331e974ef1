"""A consistency rule of a user's own: bounded staleness (Q. Ho et al., NIPS'13).

Every push changes the weights at once, and no worker begins a step while another one has not made
the step that was `STALENESS` before the last: it would compute with weights that are too old.
"""

from p3kv.consistency import CONSISTENCIES, Consistency

STALENESS = 2


class Bounded(Consistency):
    """Nobody is more than `STALENESS` rounds ahead of the slowest worker."""

    own_rounds = True
    window = 1

    def needs(self, round: int) -> int:
        return round - STALENESS


CONSISTENCIES.register("bounded_by_2", Bounded)
