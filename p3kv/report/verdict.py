"""What limits a job, and the numbers that say so: rates, shares of a step, and the verdict."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional

from p3kv.report.forecast import DDP, FRAMEWORKS_OWN, Workload, forecast
from p3kv.report.forecast.bound import ideal_fifo_s, lower_bound_s
from p3kv.wire.messages import Lag, Numbers, WorkerNumbers

COMPUTE, SCRIPT, NETWORK, SERVER, STRAGGLER, PROCESSOR = PARTS = (
    "computing", "script", "network", "server", "straggler", "processor",
)  # fmt: skip
"""The parts of a step. `WorkerNumbers` has the seconds of each."""

_IS = {
    COMPUTE: "computing",
    SCRIPT: "the script's own time between steps",
    NETWORK: "waiting for the network",
    SERVER: "waiting for busy servers",
    STRAGGLER: "waiting for a slow worker",
    PROCESSOR: "waiting for a free processor",
}
_LEAST = 0.005
"""A smaller share would be shown as 0%."""


def shares(numbers: WorkerNumbers, before: Optional[WorkerNumbers] = None) -> Dict[str, float]:
    """By part, its share of the time of all steps since `before`; empty without any step."""
    since = WorkerNumbers() if before is None else before
    step_s = numbers.step_s - since.step_s
    if numbers.steps <= since.steps or step_s <= 0:
        return {}
    taken = {part: getattr(numbers, f"{part}_s") - getattr(since, f"{part}_s") for part in PARTS}
    return {part: max(0.0, seconds) / step_s for part, seconds in taken.items()}


def in_short(of: Mapping[str, float], most: int = len(PARTS)) -> str:
    """'computing 60%, network 40%', the largest share first; so many at most."""
    return ", ".join(f"{part} {share:.0%}" for part, share in list(_by_size(of).items())[:most])


def in_words(of: Mapping[str, float]) -> str:
    """'60% is computing, 40% waiting for the network', the largest share first."""
    words = ", ".join(f"{share:.0%} {_IS[part]}" for part, share in _by_size(of).items())
    return words.replace("% ", "% is ", 1)


def _by_size(of: Mapping[str, float]) -> Dict[str, float]:
    large = [(part, share) for part, share in of.items() if share >= _LEAST]
    return dict(sorted(large, key=lambda one: -one[1]))


class Rates(NamedTuple):
    """Rates of a process in some seconds; the last three are None for a server."""

    send_bytes_s: float
    receive_bytes_s: float
    """Bytes on the wire."""
    queued_frames: int
    inversions: int
    step_s: Optional[float] = None
    """The time of a step; None without one."""
    shares: Optional[Dict[str, float]] = None
    """Shares of the steps' time (`p3kv.report.verdict`)."""
    slowest_layer: Optional[str] = None
    staleness: Optional[float] = None
    """How many rounds the values lacked on average with which a worker went on; None where it goes
    on with no others than those of the default rule."""

    @property
    def words(self) -> str:
        """For a line of a log."""
        parts = []
        if self.step_s is not None and self.shares is not None:
            last = f"; waits most for {self.slowest_layer}" if self.slowest_layer else ""
            parts.append(f"{seconds(self.step_s)} a step ({in_short(self.shares)}{last})")
        if self.staleness is not None:
            parts.append(f"values {self.staleness:.2g} rounds old")
        parts += [
            f"{bit_rate(self.send_bytes_s)} out",
            f"{bit_rate(self.receive_bytes_s)} in",
            f"{self.queued_frames} frames queued",
            f"{self.inversions} inversions",
        ]
        return ", ".join(parts)


def rates(before: Numbers, after: Numbers) -> Rates:
    """The rates of one process between two reports."""
    elapsed_s = max(after.uptime_s - before.uptime_s, 1e-6)
    traffic = (
        max(0, after.wire_bytes_sent - before.wire_bytes_sent) / elapsed_s,
        max(0, after.wire_bytes_received - before.wire_bytes_received) / elapsed_s,
        after.queued_frames,
        after.inversions - before.inversions,
    )
    if not isinstance(after, WorkerNumbers) or not isinstance(before, WorkerNumbers):
        return Rates(*traffic)
    values = after.stale_values - before.stale_values
    stale = (after.stale_rounds - before.stale_rounds) / values if values > 0 else None
    steps, step_s = after.steps - before.steps, after.step_s - before.step_s
    if steps <= 0 or step_s <= 0:
        return Rates(*traffic, slowest_layer=after.slowest_layer or None, staleness=stale)
    found = shares(after, before)
    return Rates(*traffic, step_s / steps, found, after.slowest_layer or None, stale)


def lag_words(lag: Lag) -> str:
    """Says which worker the others wait for, and how long."""
    return f"worker {lag.rank} comes last in {lag.share:.0%} of the rounds, by {seconds(lag.lag_s)}"


def seconds(count: float) -> str:
    """'0.41 s' or '12 ms'."""
    return f"{count:.3g} s" if count >= 0.1 else f"{count * 1000:.3g} ms"


def bit_rate(bytes_s: float) -> str:
    """'940 Mbit/s' or '9.4 Gbit/s'."""
    bit_s = 8 * bytes_s
    return f"{bit_s / 1e9:.3g} Gbit/s" if bit_s >= 1e9 else f"{bit_s / 1e6:.3g} Mbit/s"


LATENCY = "latency"
"""A limit that is no part of its own: values take long, and the link idles."""

LITTLE = 0.05
"""This part of a step is not worth a user's time."""
_NEAR = 1.25
"""A step that takes at most so many times the bound is what the network allows."""
_FEWEST_STEPS = 3
_IDLE = 0.1
"""A link that carries less than this part of what it could is no limit."""
_NAMES = {
    COMPUTE: "computation",
    SCRIPT: "the script itself",
    NETWORK: "the network",
    LATENCY: "latency, not bandwidth",
    SERVER: "a busy server",
    STRAGGLER: "a slow worker",
    PROCESSOR: "too few processors",
}
_ADVICE = {
    SCRIPT: "between two steps the script does other things: have it read data ahead, in processes "
    "of their own (DataLoader's num_workers), and validate and log less often",
    LATENCY: "the link idles while values are handled and on their way: larger batches make fewer "
    "steps of them; more bandwidth would change little",
    SERVER: "start more servers, on hosts with free processors (p3kv launch -s), or look at what "
    "the optimizer takes for an update",
    PROCESSOR: "start fewer processes on each host, or give each fewer threads (OMP_NUM_THREADS)",
}


class Verdict(NamedTuple):
    """Limit of a job, as one of its workers sees it.

    `limit` is one of the parts of a step (`p3kv.report.verdict`) or "latency". Times are of a step,
    in seconds; `compute_s` is that of the passes alone. The bounds are the shortest possible times:
    of this job, with twice the bandwidth, and with twice as many hosts that have the same links.
    They are None where the network was not measured, or there is only one worker. `link_bytes_s`:
    what a host's link carries in each direction, for hosts with a worker and a server each.
    """

    limit: str
    step_s: float
    compute_s: float
    shares: Dict[str, float]
    """Shares of a step's time, by part."""
    advice: str
    link_bytes_s: Optional[float] = None
    wire_bytes_s: Optional[float] = None
    """Average that a host of such a job sends: its worker's part, and as much of its server."""
    bound_s: Optional[float] = None
    bound_twice_the_bandwidth_s: Optional[float] = None
    bound_twice_the_hosts_s: Optional[float] = None
    slowest: Optional[Lag] = None

    @property
    def lines(self) -> List[str]:
        """For people: what limits the job, the numbers, and the advice."""
        lines = [
            f"the job's limit is {_NAMES[self.limit]}: of a step's {seconds(self.step_s)}, "
            f"{in_words(self.shares)}"
        ]
        if self.link_bytes_s is not None and self.wire_bytes_s is not None:
            lines.append(
                f"the wire carries {bit_rate(self.wire_bytes_s)} in each direction; it carried "
                f"{bit_rate(self.link_bytes_s)} when it was measured at the start"
            )
        twice, more = self.bound_twice_the_bandwidth_s, self.bound_twice_the_hosts_s
        by_network = self.limit in (NETWORK, COMPUTE)
        if self.bound_s is not None and twice is not None and more is not None and by_network:
            lines.append(
                f"the shortest possible step here: {seconds(self.bound_s)}; with twice the "
                f"bandwidth {seconds(twice)}, with twice as many hosts {seconds(more)}"
            )
        if self.slowest is not None:
            lines.append(lag_words(self.slowest))
        return [*lines, self.advice]


def verdict(
    numbers: WorkerNumbers,
    workload: Workload,
    workers: int,
    slowest: Optional[Lag],
    rank: Optional[int] = None,
) -> Optional[Verdict]:
    """Finds what limits the job; None before a few steps have ended.

    `workload` has the layers' sizes and times as they were measured, and none where workers train
    by themselves; `numbers` are those of the same worker, whose rank is `rank`.
    """
    if numbers.steps < _FEWEST_STEPS or numbers.step_s <= 0:
        return None
    found = Verdict(
        COMPUTE,
        numbers.step_s / numbers.steps,
        numbers.forward_s + numbers.backward_s or numbers.computing_s / numbers.steps,
        shares(numbers),
        "",
        slowest=slowest,
    )
    if numbers.push_bytes_s and workers > 1 and workload.arrays:
        found = _with_bounds(found, numbers, workload, workers)
    limit = _limit(found, rank)
    return found._replace(limit=limit, advice=_advice(found, limit))


def _limit(found: Verdict, rank: Optional[int]) -> str:
    """The largest of what a step waits for, where the script and the processors take less. Each of
    these goes on beside the passes: a step that waits lasts as long as they take."""
    of, last = found.shares, found.slowest
    is_last = last is not None and last.rank == rank
    if last is not None and is_last and last.waiting > max(LITTLE, of[NETWORK], of[SERVER]):
        # This worker does not wait: the others do. With a processor of its own it would not be last
        # where that is what it waits for most, or as long as the others wait for it.
        by_processor = of[PROCESSOR] >= min(last.waiting, max(of[COMPUTE], of[SCRIPT]))
        return PROCESSOR if by_processor else STRAGGLER
    waiting = max((NETWORK, SERVER, STRAGGLER), key=lambda part: of[part])
    own = max((COMPUTE, SCRIPT, PROCESSOR), key=lambda part: of[part])
    if of[waiting] <= LITTLE or of[waiting] < max(of[SCRIPT], of[PROCESSOR]):
        return own
    return LATENCY if waiting == NETWORK and _link_idles(found) else waiting


def _link_idles(found: Verdict) -> bool:
    if found.link_bytes_s is None or found.wire_bytes_s is None:
        return False
    return found.wire_bytes_s < _IDLE * found.link_bytes_s


def _advice(found: Verdict, limit: str) -> str:
    if limit == NETWORK:
        return _about_network(found)
    if limit == STRAGGLER:
        return _about_straggler(found)
    if limit == COMPUTE:
        return (
            f"a faster network would make steps at most {found.shares[NETWORK]:.1%} shorter: what "
            "counts is computation"
        )
    return _ADVICE[limit]


def with_own(
    own: str, found: Verdict, workload: Workload, workers: int, on_a_host: int
) -> Optional[str]:
    """Says what a step would take with what the framework has itself, one of `FRAMEWORKS_OWN`; None
    for another one, and where the network was not measured. `on_a_host`: how many workers send as
    one. Some tenths of a second of simulating."""
    if found.link_bytes_s is None or own not in FRAMEWORKS_OWN:
        return None
    link_bit_s = 8 * found.link_bytes_s
    if own == DDP:
        # A ring through all workers crosses each host's link once.
        layers = workload.layer_bytes, workload.forward_s, workload.backward_s
        step_s, how = ideal_fifo_s(*layers, workers, link_bit_s, payload=1.0), "at its best"
    else:  # each worker sends for itself
        simulated = forecast(workload, workers, link_bit_s / on_a_host, payload=1.0)
        step_s, how = simulated.dist_sync_s, "by simulation"
    # What a step takes beside waiting for others is the same, also where processors are busy.
    beside = 1 - sum(found.shares[part] for part in (NETWORK, SERVER, STRAGGLER))
    step_s += found.step_s * beside - workload.compute_s
    return f"with {own} a step would take at least {seconds(step_s)} on this network, {how}"


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


def _about_straggler(found: Verdict) -> str:
    who = "the slowest worker" if found.slowest is None else f"worker {found.slowest.rank}"
    text = (
        f"look at {who}: what else runs on its host, its accelerator's clock, how fast "
        "it reads data; and give it no more samples than the others"
    )
    by_processor = found.shares[PROCESSOR]
    if by_processor <= LITTLE:
        return text
    return (
        f"{text}. Here {by_processor:.0%} of a step is waiting for a free processor: if that is so "
        f"for {who}, too, {_ADVICE[PROCESSOR]}"
    )


def _about_network(found: Verdict) -> str:
    if found.bound_s is None or found.bound_twice_the_bandwidth_s is None:
        return (
            "more bandwidth or fewer bytes (P3KV_GRADIENT_CODEC, larger batches) would make steps "
            f"up to {found.shares[NETWORK]:.0%} shorter"
        )
    passes_s = found.step_s * (found.shares[COMPUTE] + found.shares[NETWORK])
    if passes_s > _NEAR * found.bound_s:
        return (
            f"steps take {passes_s / found.bound_s:.1f} times what the network allowed when it "
            "was measured: look for other traffic on it, and for busy processors on the hosts"
        )
    gain = (found.bound_s - found.bound_twice_the_bandwidth_s) / found.step_s
    return (
        "p3kv takes nearly what the network allows: only more bandwidth (twice as much makes steps "
        f"up to {gain:.0%} shorter) or fewer bytes (P3KV_GRADIENT_CODEC, larger batches) help"
    )
