"""Rules that say when a round ends, and with which value a worker goes on."""

from p3kv.consistency.bulk_synchronous import BulkSynchronous
from p3kv.consistency.consistency import CONSISTENCIES, Consistency, make_consistency

__all__ = ["CONSISTENCIES", "BulkSynchronous", "Consistency", "make_consistency"]
