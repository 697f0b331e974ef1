"""A live view of a running job: finds the job, asks its scheduler, and shows what it answers.

A process's environment says where the job's scheduler is, and the job's secret or a file that has
it. The system shows it only to the user of the process, and to root. But nobody, root least of all,
does what the environment of another account's process says: it may name any file and any port.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import zmq

from p3kv.common.addresses import endpoint
from p3kv.config import Launch
from p3kv.errors import ConfigError, PeerLostError
from p3kv.report import Rates, rates
from p3kv.report.verdict import NETWORK, PARTS, bit_rate, in_short, lag_words, seconds
from p3kv.wire.address import scheduler_address
from p3kv.wire.credentials import Credentials
from p3kv.wire.messages import (
    MAX_MESSAGE_BYTES,
    AskReports,
    Lag,
    ProcessReport,
    Reports,
    ServerNumbers,
    WorkerNumbers,
    decode,
    encode,
    slowest,
)

if TYPE_CHECKING:
    from rich.table import Table


_PROCESSES = Path("/proc")
_AT_SECURE = 23
"""See getauxval(3): whether the process runs a program with more rights than whoever started it."""
_AUXILIARY = struct.Struct("@LL")


class Found(NamedTuple):
    """A job, by one of its processes."""

    launch: Launch
    command: str
    """Command that the process runs."""


def find(pid: Optional[int]) -> Found:
    """Find the job of a process, or the only one here, by a worker if there is one; ConfigError
    where there is none, or more than one."""
    if pid is not None:
        found = _job_of(pid)
        owners = _owners_of(pid) - {os.geteuid()}
        if owners:
            raise ConfigError(
                f"process {pid} belongs to user {min(owners)}, and 'p3kv top' asks only processes "
                f"of its own user, also for root. Run it as this user: sudo -u '#{min(owners)}' ..."
            )
        # A launcher belongs to no job itself.
        below = [] if found is not None else [one for _, one in _jobs_of(_below(pid)).values()]
        if found is None and len(below) != 1:
            several = f", and has started processes of {len(below)} jobs" if below else ""
            raise ConfigError(f"process {pid} belongs to no job of yours{several}")
        return found or below[0]
    jobs = _jobs_of(_numbers())
    if len(jobs) > 1:
        some = ", ".join(
            f"{pid} ({endpoint(host, port)})" for (host, port, _), (pid, _) in jobs.items()
        )
        raise ConfigError(f"there are several jobs; name one by a process of it: {some}")
    for _, found in jobs.values():
        return found
    raise ConfigError(
        "no process of a job runs on this host as this user. Start 'p3kv top' where a worker, a "
        "server or the scheduler runs, as the same user"
    )


def _numbers() -> Iterator[int]:
    """All processes of this host, the oldest numbers first."""
    return iter(sorted(int(entry) for entry in os.listdir(_PROCESSES) if entry.isdigit()))


def _below(pid: int) -> List[int]:
    """The processes that one has started, and those that these have, as a launcher's guardian."""
    started: Dict[int, List[int]] = {}
    for number in _numbers():
        with suppress(OSError), closing(_Process(number)) as process:
            started.setdefault(process.parent(), []).append(number)
    own = started.get(pid, [])
    return [*own, *(one for child in own for one in started.get(child, ()))]


def _jobs_of(numbers: Iterable[int]) -> Dict[Tuple[str, int, str], Tuple[int, Found]]:
    """Jobs of these processes by address and name, each by a process: a worker if there is one."""
    jobs: Dict[Tuple[str, int, str], Tuple[int, Found]] = {}
    for number in numbers:
        found = _job_of(number)
        if found is not None:
            place = (found.launch.root_host, found.launch.root_port, found.launch.job)
            _, known = jobs.setdefault(place, (number, found))
            if known.launch.role != "worker" and found.launch.role == "worker":
                jobs[place] = (number, found)
    return jobs


def _job_of(pid: int) -> Optional[Found]:
    variables = {}
    # It may end while we look, and belong to somebody else.
    with suppress(OSError), closing(_Process(pid)) as process:
        # Twice: it may become another program meanwhile.
        if not process.is_ours():
            return None
        environment, command = process.read("environ"), process.read("cmdline")
        if not process.is_ours():
            return None
        for line in environment.split(b"\0"):
            name, _, value = os.fsdecode(line).partition("=")
            variables[name] = value
        with suppress(ConfigError):
            launch = Launch.from_environment(variables)
            if launch is not None:
                text = os.fsdecode(command.replace(b"\0", b" ")).strip()
                return Found(launch, "".join(one if one.isprintable() else "?" for one in text))
    return None


def _owners_of(pid: int) -> Set[int]:
    with suppress(OSError), closing(_Process(pid)) as process:
        return process.owners()
    return set()


class _Process:
    """A process, and no other that gets its number later; OSError if it has ended."""

    def __init__(self, pid: int) -> None:
        self._folder = os.open(_PROCESSES / str(pid), os.O_RDONLY | os.O_DIRECTORY)

    def read(self, name: str) -> bytes:
        """Reads a file of the process's in /proc."""
        with open(os.open(name, os.O_RDONLY, dir_fd=self._folder), "rb") as file:
            return file.read()

    def owners(self) -> Set[int]:
        """The user whose rights it has, and the one who has started it."""
        lines = self.read("status").splitlines()
        return {int(uid) for line in lines if line.startswith(b"Uid:") for uid in line.split()[1:]}

    def parent(self) -> int:
        """The process that has started it."""
        lines = self.read("status").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(b"PPid:"))

    def is_ours(self) -> bool:
        """Whether it and its environment are of this process's user."""
        if self.owners() != {os.geteuid()}:
            return False
        auxiliary = self.read("auxv")
        whole = len(auxiliary) - len(auxiliary) % _AUXILIARY.size
        return dict(_AUXILIARY.iter_unpack(auxiliary[:whole])).get(_AT_SECURE) == 0

    def close(self) -> None:
        """Forgets the process."""
        os.close(self._folder)


PATIENCE_MS = 10_000
"""How long the scheduler may take to answer."""


class Asker:
    """A connection to the scheduler of a job, as one who does not belong to it."""

    def __init__(self, launch: Launch) -> None:
        self._at = endpoint(launch.root_host, launch.root_port)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        Credentials(launch.common_secret).protect_dealer(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(f"tcp://{scheduler_address(launch)}")

    def ask(self) -> Reports:
        """Asks for the last reports of all processes; PeerLostError without an answer."""
        self._socket.send(encode(AskReports()))
        if not self._socket.poll(PATIENCE_MS):
            raise PeerLostError(
                f"the scheduler at {self._at} does not answer: it has ended, or it can't be "
                "reached, or it is of another version of p3kv"
            )
        answer: Reports = decode(self._socket.recv(), Reports)
        return answer

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        self._socket.close()
        self._context.term()


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
    """Shows a job every so many seconds, `count` times or until it has ended. Raises PeerLostError
    if its scheduler does not answer the first time."""
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
