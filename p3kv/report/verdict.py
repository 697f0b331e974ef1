"""Whether the network is a job's limit, and what would change that."""

from __future__ import annotations

from typing import List, NamedTuple, Optional

from p3kv.forecast import Workload, forecast
from p3kv.forecast.bound import lower_bound_s
from p3kv.report.rates import bit_rate, lag_words, seconds
from p3kv.wire.messages import Lag, WorkerNumbers

NETWORK, COMPUTE, STRAGGLER = "network", "compute", "straggler"

LITTLE = 0.05
"""This part of a step is not worth a user's time."""
_NEAR = 1.25
"""A step that takes at most so many times the bound is what the network allows."""
_FEWEST_STEPS = 3


class Verdict(NamedTuple):
    """What limits a job, as one of its workers sees it.

    `limit` is "network", "compute" or "straggler". Times are of a step, in seconds; `compute_s` is
    one without waiting. The bounds are the shortest possible times: of this job, with twice the
    bandwidth, and with twice as many hosts that have the same links. They are None where the
    network was not measured, or there is only one worker. `link_bytes_s`: what a host's link
    carries in each direction, for hosts with a worker and a server each.
    """

    limit: str
    step_s: float
    compute_s: float
    waiting: float
    advice: str
    link_bytes_s: Optional[float] = None
    wire_bytes_s: Optional[float] = None
    """What a host of such a job sends on average: its worker's part, and as much of its server."""
    bound_s: Optional[float] = None
    bound_twice_the_bandwidth_s: Optional[float] = None
    bound_twice_the_hosts_s: Optional[float] = None
    slowest: Optional[Lag] = None

    @property
    def lines(self) -> List[str]:
        """For people: what limits the job, the numbers, and the advice."""
        name = {NETWORK: "the network", COMPUTE: "computation", STRAGGLER: "a slow worker"}
        lines = [
            f"the job's limit is {name[self.limit]}: {self.waiting:.0%} of a step's "
            f"{seconds(self.step_s)} is waiting for the network; computing takes "
            f"{seconds(self.compute_s)}"
        ]
        if self.link_bytes_s is not None and self.wire_bytes_s is not None:
            lines.append(
                f"the wire carries {bit_rate(self.wire_bytes_s)} in each direction; it carried "
                f"{bit_rate(self.link_bytes_s)} when it was measured at the start"
            )
        twice, more = self.bound_twice_the_bandwidth_s, self.bound_twice_the_hosts_s
        if self.bound_s is not None and twice is not None and more is not None:
            lines.append(
                f"the shortest possible step here: {seconds(self.bound_s)}; with twice the "
                f"bandwidth {seconds(twice)}, with twice as many hosts {seconds(more)}"
            )
        if self.slowest is not None:
            lines.append(lag_words(self.slowest))
        return [*lines, self.advice]


def verdict(
    numbers: WorkerNumbers, workload: Workload, workers: int, slowest: Optional[Lag]
) -> Optional[Verdict]:
    """What limits the job; None before a few steps have ended.

    `workload` has the layers' sizes and times as they were measured, `numbers` are those of the
    same worker.
    """
    if numbers.steps < _FEWEST_STEPS or numbers.step_s <= 0:
        return None
    step_s = numbers.step_s / numbers.steps
    found = Verdict(
        COMPUTE,
        step_s,
        numbers.forward_s + numbers.backward_s,
        numbers.waiting_s / numbers.step_s,
        "",
        slowest=slowest,
    )
    if numbers.push_bytes_s and workers > 1:
        found = _with_bounds(found, numbers, workload, workers)
    behind_s = 0.0 if slowest is None else _behind_s(slowest, workers)
    # At least half of the waiting. If this is the slowest worker, it does not wait.
    if slowest is not None and behind_s > step_s * max(LITTLE, found.waiting / 2):
        return found._replace(limit=STRAGGLER, advice=_about_straggler(slowest))
    if found.waiting > LITTLE:
        return found._replace(limit=NETWORK, advice=_about_network(found))
    return found._replace(
        advice=f"a faster network would make steps at most {found.waiting:.1%} shorter: what "
        "counts is computation"
    )


def with_dist_sync(found: Verdict, workload: Workload, workers: int) -> Optional[str]:
    """What a step would take with the framework's synchronous store, in a sentence; None where the
    network was not measured. Some tenths of a second of simulating."""
    if found.link_bytes_s is None:
        return None
    simulated = forecast(workload, workers, 8 * found.link_bytes_s, payload=1.0)
    return (
        f"with dist_sync a step would take at least {seconds(simulated.dist_sync_s)} on this "
        "network, by simulation"
    )


def _with_bounds(
    found: Verdict, numbers: WorkerNumbers, workload: Workload, workers: int
) -> Verdict:
    # What hosts with a worker and a server each have: both send (n-1)/n of what a worker pushes.
    part = 2 * (workers - 1) / workers
    sent = numbers.bytes_sent + numbers.bytes_received
    all_bytes = 2 * numbers.steps * sum(workload.layer_bytes)
    # Less than all travels where a codec encodes it.
    layers = [min(1.0, sent / all_bytes) * size for size in workload.layer_bytes]
    wire_bytes_s = part * sum(layers) / found.step_s
    link_bytes_s = part * numbers.push_bytes_s

    def bound_s(hosts: int, bytes_s: float) -> float:
        return lower_bound_s(
            layers, workload.forward_s, workload.backward_s, hosts, 8 * bytes_s, payload=1.0
        )

    # A measurement that contradicts the steps was too low.
    link_bytes_s *= max(1.0, bound_s(workers, link_bytes_s) / found.step_s)
    return found._replace(
        link_bytes_s=link_bytes_s,
        wire_bytes_s=wire_bytes_s,
        bound_s=min(bound_s(workers, link_bytes_s), found.step_s),
        bound_twice_the_bandwidth_s=bound_s(workers, 2 * link_bytes_s),
        bound_twice_the_hosts_s=bound_s(2 * workers, link_bytes_s),
    )


def _behind_s(lag: Lag, workers: int) -> float:
    """For how long a round waits for a worker that is slower than the others; among workers that
    are alike, each comes last in its part of the rounds."""
    by_chance = 1 / workers
    return lag.lag_s * max(0.0, lag.share - by_chance) / max(1 - by_chance, by_chance)


def _about_straggler(lag: Lag) -> str:
    return (
        f"look at worker {lag.rank}: what else runs on its host, its accelerator's clock, how fast "
        "it reads data; and give it no more samples than the others"
    )


def _about_network(found: Verdict) -> str:
    if found.bound_s is None or found.bound_twice_the_bandwidth_s is None:
        return (
            "more bandwidth or fewer bytes (P3KV_GRADIENT_CODEC, larger batches) would make steps "
            f"up to {found.waiting:.0%} shorter"
        )
    if found.step_s > _NEAR * found.bound_s:
        return (
            f"steps take {found.step_s / found.bound_s:.1f} times what the network allowed when it "
            "was measured: look for other traffic on it, and for busy processors on the hosts"
        )
    gain = 1 - found.bound_twice_the_bandwidth_s / found.bound_s
    return (
        "p3kv takes nearly what the network allows: only more bandwidth (twice as much makes steps "
        f"up to {gain:.0%} shorter) or fewer bytes (P3KV_GRADIENT_CODEC, larger batches) help"
    )
