"""Shows what a job's processes do: a table on a terminal, else lines."""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Tuple

from p3kv.config import Launch
from p3kv.errors import PeerLostError
from p3kv.report import Rates, rates
from p3kv.report.rates import bit_rate, lag_words, seconds
from p3kv.report.shares import NETWORK, in_short
from p3kv.top.ask import Asker
from p3kv.wire.messages import (
    Lag,
    ProcessReport,
    Reports,
    ServerNumbers,
    WorkerNumbers,
    slowest,
)

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    "process", "host", "step", "steps/s", "a step is", "out", "in", "queued", "inversions",
    "slowest layer",
)  # fmt: skip


class Row(NamedTuple):
    """A process, and its rates since its report before; None until it has made two."""

    process: ProcessReport
    rates: Optional[Rates]

    @property
    def name(self) -> str:
        return f"{self.process.role} {self.process.rank}"

    @property
    def step(self) -> Optional[int]:
        """How many steps a worker has made."""
        numbers = self.process.numbers
        return numbers.steps if isinstance(numbers, WorkerNumbers) else None

    @property
    def line(self) -> str:
        """For output that is no terminal."""
        step = "" if self.step is None else f"step {self.step}, "
        if self.process.gone:
            return f"{self.name}: has left"
        return f"{self.name}: {step}{self.rates.words if self.rates else 'no rates yet'}"

    @property
    def cells(self) -> List[str]:
        """By column of the table."""
        cells = [self.name, self.process.host, "" if self.step is None else str(self.step)]
        if self.process.gone or self.rates is None:
            return [*cells, "left" if self.process.gone else ""]
        found = self.rates
        return [
            *cells,
            "" if found.step_s is None else f"{1 / found.step_s:.3g}",
            "" if found.shares is None else in_short(found.shares),
            bit_rate(found.send_bytes_s),
            bit_rate(found.receive_bytes_s),
            str(found.queued_frames),
            str(found.inversions),
            found.slowest_layer or "",
        ]


class Job:
    """What is shown of a job, report after report."""

    def __init__(self) -> None:
        self._last: Dict[Tuple[str, int], ProcessReport] = {}
        self._rates: Dict[Tuple[str, int], Rates] = {}
        self.rows: List[Row] = []

    def take(self, reports: Reports) -> None:
        """Takes the scheduler's answer."""
        for process in reports.processes:
            which = (process.role, process.rank)
            before, now = self._last.get(which), process.numbers
            if now is None or (before is not None and before.numbers == now):
                continue
            if before is not None and before.numbers is not None:
                self._rates[which] = rates(before.numbers, now)
            self._last[which] = process
        self.rows = [
            Row(process, self._rates.get((process.role, process.rank)))
            for process in sorted(
                reports.processes, key=lambda one: (one.role != "worker", one.rank)
            )
        ]

    @property
    def over(self) -> bool:
        """Whether all workers have left."""
        return bool(self.rows) and all(
            row.process.gone for row in self.rows if row.process.role == "worker"
        )

    @property
    def slowest(self) -> Optional[Lag]:
        """The worker for which the others have waited longest."""
        numbers = [row.process.numbers for row in self.rows]
        return slowest(
            [one for one in numbers if isinstance(one, ServerNumbers)],
            [one for one in numbers if isinstance(one, WorkerNumbers)],
        )

    @property
    def title(self) -> str:
        """The whole job in a line."""
        steps = [row.rates.step_s for row in self.rows if row.rates and row.rates.step_s]
        shares = [row.rates.shares for row in self.rows if row.rates and row.rates.shares]
        words = f"{seconds(max(steps))} a step" if steps else "no steps yet"
        if shares:
            network = max(one[NETWORK] for one in shares)
            words += f", up to {network:.0%} waiting for the network"
        return words if self.slowest is None else f"{words}; {lag_words(self.slowest)}"

    @property
    def lines(self) -> List[str]:
        """For output that is no terminal."""
        return [self.title, *(f"  {row.line}" for row in self.rows)]


def watch(launch: Launch, every_s: float, count: Optional[int]) -> None:
    """Shows a job every so many seconds, `count` times or until it has ended.

    Raises PeerLostError if its scheduler does not answer the first time.
    """
    job = Job()
    with ExitStack() as stack:
        asker = Asker(launch)
        stack.callback(asker.close)
        show = _on_terminal(stack) if sys.stdout.isatty() else _in_lines
        for number in itertools.count():
            try:
                job.take(asker.ask())
            except PeerLostError:
                if number == 0:
                    raise
                print("the job has ended")
                return
            show(job)
            if job.over or (count is not None and number + 1 == count):
                return
            time.sleep(every_s)


def _in_lines(job: Job) -> None:
    print("\n".join([f"{time.strftime('%H:%M:%S')} {job.title}", *job.lines[1:]]), flush=True)


def _on_terminal(stack: ExitStack) -> Callable[[Job], None]:
    try:
        from rich.live import Live
    except ImportError:
        print("for a table: pip install 'p3kv[top]'", file=sys.stderr)
        return _in_lines
    live = stack.enter_context(Live(auto_refresh=False))
    return lambda job: live.update(_table(job), refresh=True)


def _table(job: Job) -> Table:
    from rich.table import Table

    table = Table(title=job.title, title_justify="left")
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number in (0, 1, 9) else "right")
    latest = job.slowest
    for row in job.rows:
        behind = latest is not None and row.name == f"worker {latest.rank}"
        table.add_row(*row.cells, style="yellow" if behind else None)
    return table
