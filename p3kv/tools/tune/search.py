"""Trials of a script with several numbers of servers, and which number is chosen."""

from __future__ import annotations

from typing import BinaryIO, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from p3kv.common.words import counted
from p3kv.config.trials import P3KV
from p3kv.tools.compare import Measured, Steps, TrialJob, Trials
from p3kv.tools.tune.equation import Equation, fit

ALIKE = 0.02
"""Steps that differ by no more are equally long: then fewer servers are better."""
_WORSE = 1.05
"""A step so many times as long as the best one ends the doubling of servers."""
PARTS = 3
"""The equation has so many parts: with fewer numbers of servers it is not determined."""
_DRAWS = 1000


class Tuning(NamedTuple):
    """What was measured, by number of servers on each host, and by slice size with the number that
    was chosen."""

    hosts: int
    workers: int
    steps: Steps
    by_servers: Dict[int, Measured]
    by_size: Dict[Optional[int], Measured]
    """None: the size that p3kv chooses. Empty if no other one was tried."""

    @property
    def equation(self) -> Equation:
        """The equation that is nearest to the times of steps."""
        return fit({count: one.step_s for count, one in self.by_servers.items()})

    @property
    def servers(self) -> int:
        """The fewest servers on each host with which a step is as short as with any."""
        best_s = min(one.step_s for one in self.by_servers.values())
        return min(
            count for count, one in self.by_servers.items() if one.step_s <= (1 + ALIKE) * best_s
        )

    @property
    def slice_size(self) -> Optional[int]:
        """The size with which a step is shortest; None if p3kv's own choice is as good."""
        if not self.by_size:
            return None
        best = min(self.by_size, key=lambda size: self.by_size[size].step_s)
        gains = self.by_size[None].step_s > (1 + ALIKE) * self.by_size[best].step_s
        return best if gains else None

    @property
    def confidence(self) -> float:
        """How often the chosen number of servers is as good as any, if rounds, and steps in each,
        are drawn again from those that were measured (bootstrap)."""
        draws = np.random.RandomState(0)
        drawn_s = {
            count: _drawn_s(
                [self.steps.each_s(max(one, key=self.steps.mean_s)) for one in measured.trials],
                draws,
            )
            for count, measured in self.by_servers.items()
        }
        best_s = np.min(list(drawn_s.values()), axis=0)
        return float(np.mean(drawn_s[self.servers] <= (1 + ALIKE) * best_s))


def _drawn_s(rounds: Sequence[Sequence[float]], draws: np.random.RandomState) -> np.ndarray:
    """Times of a step: medians of rounds that are drawn, each the mean of its steps that are."""
    steps_s = np.array(rounds)
    count, length = steps_s.shape
    which = draws.randint(count, size=(_DRAWS, count))
    of_each = draws.randint(length, size=(_DRAWS, count, length))
    return np.median(steps_s[which[:, :, None], of_each].mean(axis=2), axis=1)


def tune(
    job: TrialJob,
    most: int,
    sizes: Sequence[int],
    steps: int,
    rounds: int,
    say: Callable[[str], None],
    show: Optional[BinaryIO],
) -> Tuning:
    """Runs the job with 1, 2, 4 ... servers on each host, `most` at most, until steps become
    longer, and with the number by the equation; then with each slice size.

    All are measured in `rounds`, each second one backwards. `say`, `show` and what is raised are
    those of `p3kv.tools.compare.compare`.
    """
    trials = Trials(steps, say, show)
    hosts = len(job.hosts) or 1
    by_servers: Dict[int, Measured] = {}
    by_size: Dict[Optional[int], Measured] = {}

    def run(found: Measured, count: int, size: Optional[int], number: int, what: str) -> float:
        of_all = job._replace(servers=count * hosts, slice_size=size)
        title = f"round {number} of {rounds}, {what}"
        reports = trials.run(of_all, title, P3KV)
        step_s = found.add(trials.steps, reports)
        say(f"{title}: {1000 * step_s:.4g} ms a step")
        return step_s

    def with_servers(count: int, number: int) -> float:
        found = by_servers.setdefault(count, Measured([], [], []))
        return run(found, count, None, number, in_words(count))

    for count in doubled(most):
        step_s = with_servers(count, 1)
        best_s = min(one.step_s for one in by_servers.values())
        if len(by_servers) >= PARTS and step_s > _WORSE * best_s:
            break
    found = Tuning(hosts, job.workers, trials.steps, by_servers, by_size)
    best = found.equation.best(max(by_servers))
    if len(by_servers) >= PARTS and best not in by_servers:
        with_servers(best, 1)
    for number in range(2, rounds + 1):
        for count in sorted(by_servers, reverse=number % 2 == 0):
            with_servers(count, number)
    if sizes:
        by_size.update({size: Measured([], [], []) for size in (None, *sizes)})
        for number in range(1, rounds + 1):
            for size in list(by_size)[:: 1 if number % 2 else -1]:
                what = "slices as p3kv chooses" if size is None else f"slices of {size} elements"
                run(by_size[size], found.servers, size, number, what)
    return found._replace(steps=trials.steps)


def doubled(most: int) -> List[int]:
    """1, 2, 4 ... and `most`."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def in_words(count: int) -> str:
    """A number of servers for people."""
    return f"{counted(count, 'server')} on each host"
