"""Bulk-synchronous: every worker goes on with the value of the round for which it has pushed."""

from __future__ import annotations

from p3kv.consistency.consistency import CONSISTENCIES, Consistency


class BulkSynchronous(Consistency):
    """Synchronous SGD. One round more may be open than workers wait for, so that a worker that is
    ahead sends its next gradients while the last round ends."""

    window = 2

    def needs(self, round: int) -> int:
        return round


CONSISTENCIES.register("bulk_synchronous", BulkSynchronous)
