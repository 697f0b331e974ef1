"""Asynchronous: every push updates the value by itself, and no worker waits for another."""

from __future__ import annotations

from p3kv.consistency.consistency import CONSISTENCIES, Consistency

ASYNCHRONOUS = "asynchronous"


class Asynchronous(Consistency):
    """Asynchronous SGD: a worker waits for no other. It goes on with the value that has its own
    pushes, and all pushes of others that came before. It may push for one round more while it waits
    for that value."""

    own_rounds = True
    window = 2

    def needs(self, round: int) -> int:
        return 0


CONSISTENCIES.register(ASYNCHRONOUS, Asynchronous)
