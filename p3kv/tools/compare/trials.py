"""Runs trials of a script one after the other: those of a comparison, and others'."""

from __future__ import annotations

import signal
import time
from typing import BinaryIO, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3kv import config
from p3kv.codecs import CODECS, GRADIENTS, VALUES, check_codec
from p3kv.common import words
from p3kv.common.registry import choice_of
from p3kv.common.words import counted
from p3kv.config.trials import ALONE, FIFO, NATIVE, P3KV, Report, Trial
from p3kv.errors import ConfigError, P3Error
from p3kv.processes.launcher import Host, launch, launch_on
from p3kv.report.forecast import Workload
from p3kv.report.verdict import seconds
from p3kv.tools.compare.output import Output
from p3kv.tools.compare.results import (
    COMPUTING,
    FEWEST_STEPS,
    Comparison,
    Measured,
    Steps,
    workload,
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
        self.steps = Steps.of(steps)
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
        """Runs a trial, whose name for people is `title`; returns what its workers have told.

        Raises TrialFailed, and KeyboardInterrupt when the user has stopped it.
        """
        trial = self.steps.trial(store, front_end, codecs)
        reports = _reports(job, trial, title, self._show)
        made = min(len(report.times_s) for report in reports)
        if made < trial.last_step:
            if made < FEWEST_STEPS or not self._is_first:
                raise TrialFailed(_about_few(made, self.steps), 1)
            self.steps = Steps.within(made)
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
    """Runs all stores in turn, `rounds` times, and p3kv with each codec, in both directions where
    it is for values, too.

    Raises ConfigError for a codec that there is not. `say` gets a line for each trial; `show` gets
    what the processes print. Raises TrialFailed, and KeyboardInterrupt when the user has stopped
    it.
    """
    trials = Trials(steps, say, show)
    with_codecs = {f"{P3KV}, {codec}": _directions(codec) for codec in codecs}
    # p3kv first: it says best what is wrong with a job, and never waits without end.
    order = [P3KV, *with_codecs, FIFO, NATIVE, ALONE]
    say(
        f"{rounds * len(order)} trials, each of {trials.steps.warm_up} steps to warm up and "
        f"{trials.steps.measured} that are measured"
    )
    found: Dict[str, Measured] = {store: Measured([], [], []) for store in reversed(order)}
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
    """The layers of a script and how long each computes, by one worker that sends nothing; and what
    its framework has itself.

    Raises TrialFailed, ConfigError for a script whose steps do not send every element, and
    KeyboardInterrupt when the user has stopped it.
    """
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


def _about_few(made: int, plan: Steps) -> str:
    if made < FEWEST_STEPS:
        return (
            f"the script ended after {made} steps, and {FEWEST_STEPS} are needed at least: give it "
            "more batches or epochs"
        )
    return (
        f"the script ended after {made} steps, and made {plan.warm_up + plan.measured + 1} before: "
        "it must make as many each time"
    )
