"""Time of a step by the number of servers: equation 1 of Parallax (EuroSys'19, section 3.2)."""

from __future__ import annotations

from itertools import combinations
from typing import Mapping, NamedTuple

import numpy as np


class Equation(NamedTuple):
    """Time of a step with P servers on each host: `fixed_s` + `shared_s` / P + `each_s` * P."""

    fixed_s: float
    """What the number of servers does not change."""
    shared_s: float
    """Work that servers share."""
    each_s: float
    """What each further server costs."""

    def step_s(self, servers: float) -> float:
        """The time of a step."""
        return self.fixed_s + self.shared_s / servers + self.each_s * servers

    def best(self, most: int) -> int:
        """The number of servers, `most` at most, with which a step is shortest."""
        return min(range(1, most + 1), key=self.step_s)


def fit(steps_s: Mapping[int, float]) -> Equation:
    """The equation without negative parts that is nearest to times of steps by number of servers,
    by least squares.

    The best one without bounds for some of the parts, and 0 for the others: there are seven such
    sets, and one of them is the answer.
    """
    servers = np.array(list(steps_s), dtype=float)
    times_s = np.array(list(steps_s.values()))
    columns = np.stack([np.ones_like(servers), 1 / servers, servers], axis=1)
    found = np.zeros(3)
    for count in (1, 2, 3):
        for chosen in map(list, combinations(range(3), count)):
            tried = np.zeros(3)
            tried[chosen] = np.linalg.lstsq(columns[:, chosen], times_s, rcond=None)[0]
            if (tried >= 0).all() and _squares(columns, tried, times_s) < _squares(
                columns, found, times_s
            ):
                found = tried
    return Equation(*map(float, found))


def _squares(columns: np.ndarray, parts: np.ndarray, times_s: np.ndarray) -> float:
    return float(np.square(columns @ parts - times_s).sum())
