"""Rules that say when a round ends, and with which value a worker goes on."""

from p3kv.consistency.asynchronous import ASYNCHRONOUS, Asynchronous
from p3kv.consistency.bounded import Bounded
from p3kv.consistency.bulk_synchronous import BulkSynchronous
from p3kv.consistency.consistency import (
    CONSISTENCIES,
    Consistency,
    LocalTraining,
    consistency_of_key,
    make_consistency,
)
from p3kv.consistency.delayed import Delayed
from p3kv.consistency.local import Local

__all__ = [
    "ASYNCHRONOUS",
    "CONSISTENCIES",
    "Asynchronous",
    "Bounded",
    "BulkSynchronous",
    "Consistency",
    "Delayed",
    "Local",
    "LocalTraining",
    "consistency_of_key",
    "make_consistency",
]
