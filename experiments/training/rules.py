"""Weights with which a worker computes while a network is trained."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A consistency rule, as a job's environment names it once the staleness is known."""

    title: str
    consistency: str

    def setting(self, staleness: int) -> str:
        return self.consistency.format(staleness=staleness)


EXACT, STALE, PREDICTED, DAMPED = "exact", "stale", "predicted", "damped"
RULES = {
    EXACT: Rule("exact", "bulk_synchronous"),
    STALE: Rule("stale", "delayed:staleness={staleness}"),
    PREDICTED: Rule("predicted, equation 4", "delayed:staleness={staleness},predict=true"),
    DAMPED: Rule("predicted, damped", "delayed:staleness={staleness},predict=damped"),
}
"""By name."""
