"""Trials of a script with several stores: runs them, and keeps what their workers have measured."""

from __future__ import annotations

import io
import signal
import statistics
import threading
import time
from collections import deque
from typing import Any, BinaryIO, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3kv import config
from p3kv.codecs import CODECS, GRADIENTS, VALUES, check_codec
from p3kv.common import words
from p3kv.common.registry import choice_of
from p3kv.common.words import counted
from p3kv.config.trials import ALONE, FIFO, NATIVE, P3KV, LayerReady, Report, Trial, TrialReports
from p3kv.errors import ConfigError, P3Error
from p3kv.processes.launcher import Host, launch, launch_on
from p3kv.report.forecast import FRAMEWORKS_OWN, Forecast, Workload, forecast
from p3kv.report.forecast.bound import TCP_PAYLOAD, wire_time_s
from p3kv.report.forecast.simulator import FLOAT32_BYTES
from p3kv.report.verdict import seconds

_KEPT_LINES = 40
_BETWEEN = " | "
"""Between a process's name and its line, as the launcher writes it."""


class Output:
    """Takes the lines of all processes, in any thread."""

    def __init__(self, show: Optional[BinaryIO]) -> None:
        """`show` gets all that is no report, at once; None keeps the last lines of it."""
        self.reports = TrialReports()
        self._show = show
        self._last: Deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()

    def stream(self) -> BinaryIO:
        """Something to write to; each needs whole lines."""
        return _Stream(self)  # type: ignore[return-value]  # a RawIOBase is all that is asked for

    @property
    def last_lines(self) -> List[str]:
        """The last lines that are no reports, unless they are shown already."""
        return list(self._last)

    def take(self, line: str) -> None:
        """Takes a line without its end."""
        name, _, text = line.partition(_BETWEEN)
        with self._lock:
            if not self.reports.take(name.strip(), text) and (text or _BETWEEN not in line):
                if self._show is None:
                    self._last.append(line)
                else:
                    self._show.write(f"{line}\n".encode())
                    self._show.flush()


class _Stream(io.RawIOBase):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        self._rest = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *lines, self._rest = (self._rest + bytes(data)).split(b"\n")
        for line in lines:
            self._output.take(line.decode(errors="replace"))
        return len(data)


COMPUTING = "computing alone"
_TITLES = {ALONE: COMPUTING, FIFO: "p3kv, FIFO"}
FEWEST_STEPS = 8
"""A script has to make so many, to measure some after a warm-up."""
_WARM_UP = 3
"""One step of so many."""
_SPREAD = 0.1
"""If gradients are ready within this part of a step, all were ready when they were pushed, and
their times tell nothing of the backward pass."""
_BACKWARD = 2 / 3
"""Part of a step's computation, if nothing tells more: two products in a layer, and one forward."""


class StepCounts(NamedTuple):
    """How many steps a script makes in a trial."""

    warm_up: int
    measured: int

    @classmethod
    def of(cls, measured: int) -> StepCounts:
        """For so many measured steps."""
        return cls(max(2, measured // _WARM_UP), measured)

    @classmethod
    def within(cls, count: int) -> StepCounts:
        """For a script that makes `count` steps and no more."""
        warm_up = max(2, count // (_WARM_UP + 1))
        return cls(warm_up, count - warm_up - 1)

    def trial(self, store: str, front_end: str = "", codecs: Tuple[str, str] = ("", "")) -> Trial:
        """A trial of so many steps."""
        return Trial(store, self.warm_up, self.measured, front_end, codecs)

    def mean_s(self, report: Report) -> float:
        """The time of a step, on one worker."""
        return self._mean(report.times_s)

    def each_s(self, report: Report) -> List[float]:
        """The time of each measured step, on one worker."""
        measured = report.times_s[self.warm_up : self.warm_up + self.measured + 1]
        return [after - before for before, after in zip(measured, measured[1:])]

    def mean_cpu_s(self, report: Report) -> float:
        """The processor time of a step, of one worker's process."""
        return self._mean(report.cpu_s)

    def _mean(self, until_s: Sequence[float]) -> float:
        measured = until_s[self.warm_up : self.warm_up + self.measured + 1]
        return (measured[-1] - measured[0]) / (len(measured) - 1)


class StoreTimes(NamedTuple):
    """Measurements of one store's trials, by round."""

    steps_s: List[float]
    """The time of a step, on the slowest worker."""
    cpu_s: List[float]
    """The processor time of a step, of the worker's process that takes most."""
    trials: List[List[Report]]
    """Reports of the workers in each."""

    def add(self, steps: StepCounts, reports: List[Report]) -> float:
        """Takes what a trial's workers have told; returns the time of a step in it."""
        self.steps_s.append(max(map(steps.mean_s, reports)))
        self.cpu_s.append(max(map(steps.mean_cpu_s, reports)))
        self.trials.append(reports)
        return self.steps_s[-1]

    @property
    def step_s(self) -> float:
        """The time of a step in the median round."""
        return statistics.median(self.steps_s)

    @property
    def worker_s(self) -> float:
        """The processor time of a step in the median round, of a worker's process."""
        return statistics.median(self.cpu_s)

    @property
    def server_s(self) -> float:
        """For how long a server of p3kv's works in a step, in the median round."""
        return statistics.median(
            max(report.server_s for report in reports) for reports in self.trials
        )

    @property
    def spread(self) -> float:
        """How far the rounds are apart, as a part of the time of a step."""
        return (max(self.steps_s) - min(self.steps_s)) / self.step_s


class Comparison(NamedTuple):
    """All that was measured, by store."""

    workers: int
    measured: Dict[str, StoreTimes]
    """Without the framework's own store if that can't train the script. By title of p3kv with a
    codec."""
    shares_links: bool = False
    """Whether any host has several workers."""

    @property
    def front_end(self) -> str:
        """The script's; empty before the first trial."""
        return next((report.front_end for report in self._ours), "")

    @property
    def own(self) -> str:
        """The name of what the framework has itself; empty before the first trial."""
        return next((report.native for report in self._ours), "")

    def title(self, store: str) -> str:
        """The name of a store for people."""
        if store == NATIVE:
            return self.own
        return _TITLES.get(store, store)

    @property
    def _ours(self) -> Sequence[Report]:
        return [report for reports in self.measured[P3KV].trials for report in reports]

    @property
    def base(self) -> str:
        """The store over which speed-ups are."""
        return NATIVE if NATIVE in self.measured else FIFO

    @property
    def with_codecs(self) -> List[str]:
        """The titles of p3kv with a codec."""
        return [store for store in self.measured if store not in (ALONE, NATIVE, FIFO, P3KV)]

    @property
    def computing_s(self) -> float:
        """Time of a step where nothing is sent."""
        return self.measured[ALONE].step_s

    def waiting(self, store: str) -> float:
        """The part of a step that the same step does not take where nothing is sent."""
        return max(0.0, 1 - self.computing_s / self.measured[store].step_s)

    @property
    def spread(self) -> float:
        """Spread of the store whose rounds are furthest apart."""
        return max(one.spread for one in self.measured.values())

    @property
    def link_bit_s(self) -> Optional[float]:
        """Rate of each host's link in each direction, by p3kv's measurement; None if it was not
        measured."""
        rates = [
            [report.link_bytes_s for report in reports if report.link_bytes_s is not None]
            for store in (P3KV, FIFO)
            for reports in self.measured[store].trials
        ]
        # What disturbs a measurement makes it lower. It was one of bytes of gradients.
        most = max((statistics.median(found) for found in rates if found), default=None)
        return None if most is None else 8 * most / TCP_PAYLOAD

    @property
    def workload(self) -> Workload:
        """The script's layers, as forecasts take them."""
        layers = max((report.layers for report in self._alone), key=len)
        return workload(layers, self.computing_s)

    def codec_s(self, title: str) -> float:
        """Processor seconds that a codec adds to a step, on the worker or on the server, the
        larger."""
        codec, exact = self.measured[title], self.measured[P3KV]
        return max(0.0, codec.worker_s - exact.worker_s, codec.server_s - exact.server_s)

    def pays_below_bit_s(self, title: str) -> float:
        """Rate of links above which a codec gains nothing: computing, or the codec, takes longer
        than sending exact arrays."""
        longest_s = max(self.computing_s, self.codec_s(title))
        size_bytes = sum(self.workload.layer_bytes)
        return wire_time_s(size_bytes, self.workers, 1.0) / longest_s

    @property
    def sends_all(self) -> bool:
        """Whether a step sends all elements, as forecasts take it."""
        return all(report.sends_all for report in self._alone)

    @property
    def _alone(self) -> List[Report]:
        return [report for reports in self.measured[ALONE].trials for report in reports]

    def forecast(self) -> Optional[Forecast]:
        """Forecast of steps on the network that was measured; None if that is not known."""
        rate = self.link_bit_s
        knows = self.own in FRAMEWORKS_OWN
        if rate is None or not self.sends_all or self.shares_links or not knows:
            return None
        return forecast(self.workload, self.workers, rate)


def workload(layers: Sequence[LayerReady], computing_s: float) -> Workload:
    """Workload by the times at which a worker that computes alone had its gradients ready, and by
    how long its steps take.

    Keys whose gradients are ready last are needed first. A layer's backward pass lasts from when
    the gradient before it is ready; the first one shows no time and is taken for average. What is
    left of the step is the forward pass, and divided like the backward pass. But a forward pass
    does not take longer than the backward pass: what is left then comes before the first layer,
    as reading data does.
    """
    count = len(layers)
    ready_s = [layer.ready_s for layer in layers]
    backward_s = ready_s[-1] * count / max(1, count - 1)
    gaps_s = [after - before for before, after in zip(ready_s, ready_s[1:])]
    by_layer = [backward_s / count, *gaps_s]
    if not _SPREAD * computing_s < backward_s < computing_s:
        backward_s = _BACKWARD * computing_s
        by_layer = [backward_s / count] * count
    forward_s = min(computing_s - backward_s, backward_s)
    other_s = computing_s - backward_s - forward_s
    arrays: List[List[Tuple[int, int]]] = [
        [(layer.key, layer.size_bytes // FLOAT32_BYTES)] for layer in layers
    ]
    by_layer.reverse()
    arrays.reverse()
    share = forward_s / backward_s
    return Workload(
        [[], *arrays], [other_s, *(share * seconds for seconds in by_layer)], [0.0, *by_layer]
    )


Say = Callable[[str], None]


class TrialJob(NamedTuple):
    """Processes that each trial starts: `workers` on this machine, or on `hosts`."""

    command: Sequence[str]
    workers: int
    servers: int
    hosts: Sequence[Host] = ()
    slice_size: Optional[int] = None
    """None: as the settings say."""


class TrialFailed(P3Error):
    """A trial's job has failed, or its script does not let itself be measured."""

    def __init__(self, sentence: str, code: int, last_lines: Sequence[str] = ()) -> None:
        """`code` is for the command to end with; `last_lines` are what the job has printed."""
        super().__init__(sentence)
        self.code = code
        self.last_lines = last_lines


class Trials:
    """Runs trials of one script, and learns from the first how many steps the script makes."""

    def __init__(self, steps: int, say: Say, show: Optional[BinaryIO]) -> None:
        """`steps` are measured in each. `say` gets a line for what people should know; `show` gets
        what the processes print."""
        self.steps = StepCounts.of(steps)
        """Of all trials; those that the first trial had."""
        self._say = say
        self._show = show
        self._is_first = True

    def run(
        self,
        job: TrialJob,
        title: str,
        store: str,
        front_end: str = "",
        codecs: Tuple[str, str] = ("", ""),
    ) -> List[Report]:
        """Run a trial called `title`; return its workers' reports. TrialFailed; KeyboardInterrupt
        when the user has stopped it."""
        trial = self.steps.trial(store, front_end, codecs)
        reports = _reports(job, trial, title, self._show)
        made = min(len(report.times_s) for report in reports)
        if made < trial.last_step:
            if made < FEWEST_STEPS or not self._is_first:
                raise TrialFailed(_about_few(made, self.steps), 1)
            self.steps = StepCounts.within(made)
            self._say(
                f"the script ends after {made} steps: {self.steps.measured} of them are measured, "
                f"after {self.steps.warm_up} to warm up"
            )
        self._is_first = False
        return reports


def compare(
    job: TrialJob,
    steps: int,
    rounds: int,
    codecs: Sequence[str],
    say: Say,
    show: Optional[BinaryIO],
) -> Comparison:
    """Run all stores in turn, `rounds` times, and p3kv with each codec, for values where it serves.

    `say` gets a line for each trial, `show` what processes print. Raises ConfigError for an unknown
    codec, TrialFailed, and KeyboardInterrupt when the user has stopped it.
    """
    trials = Trials(steps, say, show)
    with_codecs = {f"{P3KV}, {codec}": _directions(codec) for codec in codecs}
    # p3kv first: it says best what is wrong with a job, and never waits without end.
    order = [P3KV, *with_codecs, FIFO, NATIVE, ALONE]
    say(
        f"{rounds * len(order)} trials, each of {trials.steps.warm_up} steps to warm up and "
        f"{trials.steps.measured} that are measured"
    )
    found: Dict[str, StoreTimes] = {store: StoreTimes([], [], []) for store in reversed(order)}
    begin_s = time.monotonic()
    for number in range(rounds):
        # Every second round goes the other way: a machine that slows down disturbs all alike.
        for store in [one for one in order if one in found][:: -1 if number % 2 else 1]:
            told = Comparison(job.workers, found)
            title = f"round {number + 1} of {rounds}, {told.title(store)}"
            codec = with_codecs.get(store)
            try:
                reports = trials.run(
                    job, title, P3KV if codec else store, told.front_end, codec or ("", "")
                )
            except TrialFailed as failure:
                if store not in (NATIVE, *with_codecs) or found[store].steps_s:
                    raise
                # p3kv has trained this script: that the other store or a codec can't is a result.
                del found[store]
                say("\n".join([str(failure), *failure.last_lines]))
                continue
            step_s = found[store].add(trials.steps, reports)
            say(f"{title}: {1000 * step_s:.4g} ms a step")
            if sum(len(one.steps_s) for one in found.values()) == 1:
                left_s = (rounds * len(order) - 1) * (time.monotonic() - begin_s)
                say(f"the others take some {seconds(left_s)} if all take as long as this one")
    return Comparison(job.workers, found, any(host.workers > 1 for host in job.hosts))


def _directions(codec: str) -> Tuple[str, str]:
    """The codecs of gradients and values where this one serves as far as it can."""
    choice = choice_of(codec, "--codecs")
    check_codec(choice, GRADIENTS)
    both = VALUES in CODECS.find(choice.name).directions
    return codec, codec if both else "identity"


def computation(
    command: Sequence[str], steps: int, show: Optional[BinaryIO]
) -> Tuple[Workload, str]:
    """Layers of a script and their times, by one worker that sends nothing; and its framework's own
    store. TrialFailed; ConfigError for steps that do not send every element; KeyboardInterrupt."""
    trials = Trials(steps, lambda line: None, show)
    [report] = trials.run(TrialJob(command, 1, 1), COMPUTING, ALONE)
    if not report.sends_all:
        raise ConfigError("the simulator knows no sparse gradients and no codecs")
    return workload(report.layers, trials.steps.mean_s(report)), report.native


def _reports(job: TrialJob, trial: Trial, title: str, show: Optional[BinaryIO]) -> List[Report]:
    """Runs a trial; returns what its workers have told."""
    output = Output(show)
    environment = config.environment_of(trial, job.slice_size)
    out, err, native = output.stream(), output.stream(), not trial.runs_p3kv
    if job.hosts:
        code = launch_on(
            job.hosts, job.command, job.servers, env=environment, out=out, err=err, native=native
        )
    else:
        code = launch(
            job.command, job.workers, job.servers, env=environment, out=out, err=err, native=native
        )
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    told = output.reports.newest
    if code:
        raise TrialFailed(f"{title}: the job failed, as its output says", code, output.last_lines)
    if len(told) < job.workers:
        raise TrialFailed(
            f"{title}: {job.workers - len(told)} of {counted(job.workers, 'worker')} did not "
            "import p3kv. Make 'import p3kv' the script's first import, or start it as 'p3kv run "
            "train.py'",
            1,
            output.last_lines,
        )
    if not any(report.times_s for report in told.values()):
        raise TrialFailed(
            f"{title}: the script ended without a step that p3kv has made; it must use "
            f"{words.current().create_store}",
            1,
            output.last_lines,
        )
    return list(told.values())


def _about_few(made: int, plan: StepCounts) -> str:
    if made < FEWEST_STEPS:
        return (
            f"the script ended after {made} steps, and {FEWEST_STEPS} are needed at least: give it "
            "more batches or epochs"
        )
    return (
        f"the script ended after {made} steps, and made {plan.warm_up + plan.measured + 1} before: "
        "it must make as many each time"
    )
