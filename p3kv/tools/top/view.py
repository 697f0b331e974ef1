"""Shows what a job's processes do: a table on a terminal, else lines."""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3kv.errors import PeerLostError
from p3kv.report import Rates, rates
from p3kv.report.verdict import NETWORK, PARTS, bit_rate, in_short, lag_words, seconds
from p3kv.tools.top.ask import Asker
from p3kv.tools.top.jobs import Found
from p3kv.wire.messages import Lag, ProcessReport, Reports, ServerNumbers, WorkerNumbers, slowest

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    "process", "host", "step", "steps/s", "a step is", "out", "in", "queued", "inversions",
    "slowest layer",
)  # fmt: skip
_LEAST_IMPORTANT = ("inversions", "host", "queued", "slowest layer", "step", "in", "out")
"""Columns that are left out one after the other where a terminal is too narrow for all."""
_LONGEST_NAME = 28
"""So much of a layer's name is shown: its end, which tells layers apart."""
_MAIN_PARTS = 2
"""So many parts of a step are told where not all fit."""
_GAP = 2
"""Between two columns."""


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

    def cells(self, parts: int) -> List[str]:
        """By column of the table; `parts`: how many parts of a step are told."""
        cells = [self.name, self.process.host, "" if self.step is None else str(self.step)]
        if self.process.gone or self.rates is None:
            return [*cells, "left" if self.process.gone else ""]
        found = self.rates
        return [
            *cells,
            "" if found.step_s is None else f"{1 / found.step_s:.3g}",
            "" if found.shares is None else in_short(found.shares, parts),
            bit_rate(found.send_bytes_s),
            bit_rate(found.receive_bytes_s),
            str(found.queued_frames),
            str(found.inversions),
            _shortened(found.slowest_layer or ""),
        ]


class JobView:
    """View of a job, report after report."""

    def __init__(self, command: str = "") -> None:
        """`command`: what one of its processes runs."""
        self.command = command
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
        ages = [row.rates.staleness for row in self.rows if row.rates]
        known = [age for age in ages if age is not None]
        if known:
            words += f", values up to {max(known):.2g} rounds old"
        return words if self.slowest is None else f"{words}; {lag_words(self.slowest)}"

    @property
    def lines(self) -> List[str]:
        """For output that is no terminal."""
        return [self.title, *(f"  {row.line}" for row in self.rows)]

    def table(self, width: int) -> Tuple[List[str], List[List[str]]]:
        """The names of the columns that fit a terminal of `width` letters, and each row's cells."""
        names, cells = list(_COLUMNS), self._cells(len(PARTS))
        if _width(names, cells) > width:
            cells = self._cells(_MAIN_PARTS)
        for unimportant in _LEAST_IMPORTANT:
            if _width(names, cells) <= width:
                break
            number = names.index(unimportant)
            for line in (names, *cells):
                del line[number]
        return names, cells

    def _cells(self, parts: int) -> List[List[str]]:
        rows = [row.cells(parts) for row in self.rows]
        return [[*cells, *[""] * (len(_COLUMNS) - len(cells))] for cells in rows]


def _width(names: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    return sum(widths) + _GAP * (len(widths) - 1)


def watch(found: Found, every_s: float, count: Optional[int]) -> None:
    """Shows a job every so many seconds, `count` times or until it has ended.

    Raises PeerLostError if its scheduler does not answer the first time.
    """
    job = JobView(found.command)
    with ExitStack() as stack:
        asker = Asker(found.launch)
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


def _in_lines(job: JobView) -> None:
    print("\n".join([f"{time.strftime('%H:%M:%S')} {job.title}", *job.lines[1:]]), flush=True)


def _on_terminal(stack: ExitStack) -> Callable[[JobView], None]:
    try:
        from rich.live import Live
    except ImportError:
        print("for a table: pip install 'p3kv[top]'", file=sys.stderr)
        return _in_lines
    live = stack.enter_context(Live(auto_refresh=False))
    return lambda job: live.update(_table(job, live.console.width), refresh=True)


def _table(job: JobView, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = Text(f"{job.command}\n{job.title}")
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0)
    )
    names, cells = job.table(width)
    for name in names:
        text = name in ("process", "host", "a step is", "slowest layer")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    latest = job.slowest
    for row, shown in zip(job.rows, cells):
        behind = latest is not None and row.name == f"worker {latest.rank}"
        table.add_row(*shown, style="yellow" if behind else None)
    return table


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"
