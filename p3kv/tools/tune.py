"""How many servers pay for a script: trials, the equation that is fitted to them, the choice."""

from __future__ import annotations

from itertools import combinations
from typing import BinaryIO, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from p3kv.common.words import counted
from p3kv.config.trials import P3KV
from p3kv.report.verdict import seconds
from p3kv.tools.trials import StepCounts, StoreTimes, TrialJob, Trials


class Equation(NamedTuple):
    """Time of a step with P servers on each host: `fixed_s` + `shared_s` / P + `each_s` * P."""

    fixed_s: float
    """Time that does not depend on the number of servers."""
    shared_s: float
    """Work that servers share."""
    each_s: float
    """Cost of each further server."""

    def step_s(self, servers: float) -> float:
        """The time of a step."""
        return self.fixed_s + self.shared_s / servers + self.each_s * servers

    def best(self, most: int) -> int:
        """The number of servers, `most` at most, with which a step is shortest."""
        return min(range(1, most + 1), key=self.step_s)


def fit(steps_s: Mapping[int, float]) -> Equation:
    """Fit the equation without negative parts to times of steps by number of servers (least
    squares).

    It is the best of the seven fits in which some parts are 0 and the others have no bounds.
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


ALIKE = 0.02
"""StepCounts that differ by no more are equally long: then fewer servers are better."""
_WORSE = 1.05
"""A step so many times as long as the best one ends the doubling of servers."""
PARTS = 3
"""The equation has so many parts: with fewer numbers of servers it is not determined."""
_DRAWS = 1000


class ServerTuning(NamedTuple):
    """Times of steps by number of servers, and by slice size with the chosen number."""

    hosts: int
    workers: int
    steps: StepCounts
    by_servers: Dict[int, StoreTimes]
    by_size: Dict[Optional[int], StoreTimes]
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
        """How often the chosen number of servers is as good as any in draws from what was measured
        (bootstrap)."""
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
) -> ServerTuning:
    """Run the job with 1, 2, 4 ... servers on each host until steps become longer, with the number
    by the equation, then with each slice size; in `rounds`, each second one backwards. `say`,
    `show` and errors are those of `p3kv.tools.trials.compare`."""
    trials = Trials(steps, say, show)
    hosts = len(job.hosts) or 1
    by_servers: Dict[int, StoreTimes] = {}
    by_size: Dict[Optional[int], StoreTimes] = {}

    def run(found: StoreTimes, count: int, size: Optional[int], number: int, what: str) -> float:
        of_all = job._replace(servers=count * hosts, slice_size=size)
        title = f"round {number} of {rounds}, {what}"
        reports = trials.run(of_all, title, P3KV)
        step_s = found.add(trials.steps, reports)
        say(f"{title}: {1000 * step_s:.4g} ms a step")
        return step_s

    def with_servers(count: int, number: int) -> float:
        found = by_servers.setdefault(count, StoreTimes([], [], []))
        return run(found, count, None, number, in_words(count))

    for count in doubled(most):
        step_s = with_servers(count, 1)
        best_s = min(one.step_s for one in by_servers.values())
        if len(by_servers) >= PARTS and step_s > _WORSE * best_s:
            break
    found = ServerTuning(hosts, job.workers, trials.steps, by_servers, by_size)
    best = found.equation.best(max(by_servers))
    if len(by_servers) >= PARTS and best not in by_servers:
        with_servers(best, 1)
    for number in range(2, rounds + 1):
        for count in sorted(by_servers, reverse=number % 2 == 0):
            with_servers(count, number)
    if sizes:
        by_size.update({size: StoreTimes([], [], []) for size in (None, *sizes)})
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


_SURE = 0.9


def table(found: ServerTuning) -> List[str]:
    """The lines of the table: each number of servers, and what the equation says of it."""
    fits = len(found.by_servers) >= PARTS
    rows = [("servers on each host", "in all", "step", "spread", "by the equation" if fits else "")]
    for count, measured in sorted(found.by_servers.items()):
        rows.append((
            str(count),
            str(count * found.hosts),
            seconds(measured.step_s),
            f"{measured.spread:.0%}" if len(measured.steps_s) > 1 else "",
            seconds(found.equation.step_s(count)) if fits else "",
        ))  # fmt: skip
    return _aligned(rows)


def equation(found: ServerTuning) -> str:
    """The equation with its numbers, and how far it is off."""
    if len(found.by_servers) < PARTS:
        return (
            f"No equation: it has {PARTS} parts, and needs as many numbers of servers. Give a "
            "larger --max-servers."
        )
    fitted = found.equation
    off = max(abs(fitted.step_s(count) / one.step_s - 1) for count, one in found.by_servers.items())
    return (
        f"Equation: a step takes {_short(fitted.fixed_s)} + {_short(fitted.shared_s)} / P + "
        f"{_short(fitted.each_s)} x P with P servers on each host. It is {off:.0%} off at most, "
        f"and shortest with {fitted.best(max(found.by_servers))}."
    )


def choice(found: ServerTuning) -> str:
    """How many servers, what they gain, and how sure that is."""
    chosen = found.by_servers[found.servers]
    gain = found.by_servers[1].step_s / chosen.step_s
    text = f"Choice: {in_words(found.servers)}"
    if found.servers > 1:
        text += f", with which a step is {gain:.2f} times as fast as with 1"
    elif len(found.by_servers) > 1:
        text += ", because more make no step faster"
    text += (
        f". It is within {ALIKE:.0%} of the best in {found.confidence:.0%} of draws from the "
        "measured rounds and steps"
    )
    if found.confidence < _SURE:
        text += ": this is not sure. Take more --rounds or --steps, and hosts that are free"
    return f"{text}."


def sizes(found: ServerTuning) -> List[str]:
    """The lines of the table of slice sizes."""
    rows = [("elements in a slice", "step", "spread")]
    for size, measured in found.by_size.items():
        rows.append((
            "as p3kv chooses" if size is None else str(size),
            seconds(measured.step_s),
            f"{measured.spread:.0%}" if len(measured.steps_s) > 1 else "",
        ))  # fmt: skip
    return _aligned(rows)


def size_choice(found: ServerTuning) -> str:
    """Which size, and what it gains."""
    if found.slice_size is None:
        return "Slices: as p3kv chooses; no other size makes a step faster."
    gain = found.by_size[None].step_s / found.by_size[found.slice_size].step_s
    return f"Slices: {found.slice_size} elements, with which a step is {gain:.2f} times as fast."


def _short(value_s: float) -> str:
    return seconds(value_s) if value_s else "0"


def _aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
