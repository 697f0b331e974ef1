"""Rules that say when a round ends, and with which value a worker goes on."""

from p3kv.consistency.consistency import (
    CONSISTENCIES,
    Consistency,
    LocalTraining,
    consistency_of_key,
    make_consistency,
)
from p3kv.consistency.rules import (
    ASYNCHRONOUS,
    Asynchronous,
    Bounded,
    BulkSynchronous,
    Delayed,
    Local,
)

__all__ = [
    "ASYNCHRONOUS", "CONSISTENCIES", "Asynchronous", "Bounded", "BulkSynchronous",
    "Consistency", "Delayed", "Local", "LocalTraining", "consistency_of_key",
    "make_consistency",
]  # fmt: skip
