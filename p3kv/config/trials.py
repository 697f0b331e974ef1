"""Trials: short jobs in which a script trains a few steps with one store, and is timed.

'p3kv compare' and 'p3kv tune' instruct their processes by environment, and leave files of what they
chose. Workers report in marked lines on their standard error: that way leads from every host.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

import msgspec
from msgspec import Meta

from p3kv.common.words import counted
from p3kv.config.settings import MAX_SLICE_ELEMS, TRIAL, Settings, told_of, variable_of
from p3kv.config.variables import text_of
from p3kv.errors import ConfigError

if sys.version_info >= (3, 9):
    from typing import Annotated
else:
    from typing_extensions import Annotated

ALONE = "alone"
"""No store: each worker computes, and nothing is sent."""
NATIVE = "native"
"""The framework's own synchronous store, with its own servers."""
FIFO = "fifo"
"""p3kv, first in first out."""
P3KV = "p3kv"

_STORES = (ALONE, NATIVE, FIFO, P3KV)


_UNKNOWN = "-"


class Trial(NamedTuple):
    """One trial. `steps` are measured, after `warm_up` steps that are not."""

    store: str
    warm_up: int
    steps: int
    front_end: str = ""
    """The script's, as the first trial has told; empty in that one. Whose own store runs."""
    codecs: Tuple[str, str] = ("", "")
    """By which gradients and values travel; empty: as the settings say. They have no spaces."""

    @property
    def runs_p3kv(self) -> bool:
        """Whether the job's servers and scheduler are p3kv's."""
        return self.store in (FIFO, P3KV)

    @property
    def last_step(self) -> int:
        """The number, from 1, of the step whose first gradient ends the last measured step."""
        return self.warm_up + self.steps + 1

    def __str__(self) -> str:
        return " ".join(
            [
                self.store, str(self.warm_up), str(self.steps), self.front_end or _UNKNOWN,
                *filter(None, self.codecs),
            ]
        )  # fmt: skip

    @classmethod
    def parsed(cls, variable: str, text: str) -> Trial:
        """The trial that `str` has written; ConfigError for anything else."""
        with suppress(ValueError):
            store, warm_up, steps, front_end, *codecs = text.split()
            front_end = "" if front_end == _UNKNOWN else front_end
            if store in _STORES and len(codecs) in (0, 2):
                gradients, values = codecs or ("", "")
                return cls(store, int(warm_up), int(steps), front_end, (gradients, values))
        raise ConfigError(
            f"{variable} is '{text}'; only 'p3kv compare' and 'p3kv tune' set it: unset it"
        )


_MARK = "p3kv-trial "
_GOES_ON, _ENDS = "+", "."
_PIECE_CHARS = 3000
"""The kernel writes a line of less than 4096 bytes to a pipe in one go, whoever else writes."""


class LayerReady(NamedTuple):
    """When the gradient of a key was ready, in seconds after the first one of its step."""

    key: int
    size_bytes: int
    ready_s: float


class Report(msgspec.Struct):
    """Measurements of a worker. It tells the first, empty report when it begins."""

    times_s: Tuple[float, ...] = ()
    """When each step's gradient of one and the same parameter was ready, from the first on."""
    cpu_s: Tuple[float, ...] = ()
    """Processor time of the worker's process until then, from the first on."""
    server_s: float = 0.0
    """With p3kv: for how long in each step the server has worked that has worked most."""
    layers: Tuple[LayerReady, ...] = ()
    """Keys of a worker that computes alone, those first whose gradients are ready first."""
    link_bytes_s: Optional[float] = None
    """With p3kv: what a host's link carries in each direction, if it was measured."""
    sends_all: bool = True
    """Whether a step sends every element of every key: no codec, and no sparse gradients."""
    front_end: str = ""
    """The script's."""
    native: str = ""
    """Name of the framework's own synchronous store."""
    notes: Tuple[str, ...] = ()
    """Differences between this trial and the others."""


def tell(report: Report) -> None:
    """Writes a report for `TrialReports` to read."""
    text = msgspec.json.encode(report).decode()
    pieces = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
    for number, piece in enumerate(pieces, 1):
        mark = _MARK + (_ENDS if number == len(pieces) else _GOES_ON)
        # The script may have left a line of progress open.
        os.write(2, f"\n{mark}{piece}\n".encode())


class TrialReports:
    """Finds the reports in the lines of several workers."""

    def __init__(self) -> None:
        self.newest: Dict[str, Report] = {}
        """By worker."""
        self._pieces: Dict[str, List[str]] = {}

    def take(self, worker: str, line: str) -> bool:
        """Takes a line of a worker; false if it is none of a report."""
        if not line.startswith(_MARK):
            return False
        end, piece = line[len(_MARK) :][:1], line[len(_MARK) + 1 :]
        pieces = self._pieces.setdefault(worker, [])
        pieces.append(piece)
        if end == _ENDS:
            self.newest[worker] = msgspec.json.decode("".join(pieces), type=Report)
            pieces.clear()
        return True


def trial(environ: Mapping[str, str] = os.environ) -> Optional[Trial]:
    """The trial to which this process belongs; None for all other jobs."""
    text = text_of(TRIAL, environ)
    return Trial.parsed(TRIAL, text) if text else None


def environment_of(
    tried: Trial, slice_size: Optional[int] = None, environ: Mapping[str, str] = os.environ
) -> Dict[str, str]:
    """Environment of a trial's processes; `slice_size` None: as it is here."""
    size = {} if slice_size is None else {variable_of("slice_size"): str(slice_size)}
    return {**environ, **told_of(environ), **size, TRIAL: str(tried)}


def settings_of_a_trial(settings: Settings, tried: Trial) -> Settings:
    """A trial writes no files of p3kv's, also where a script asks for them."""
    gradients, values = tried.codecs
    return replace(
        settings,
        gradient_codec=gradients or settings.gradient_codec,
        value_codec=values or settings.value_codec,
        priorities=tried.store != FIFO,
        checkpoint_dir=None,
        resume=False,
        trace=None,
        summary_every=0,
        metrics_port=None,
    )


_MAX_BYTES = 65536
_Count = Annotated[int, Meta(ge=1, le=65535)]


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen, and the job for which it was measured."""

    servers_per_host: _Count
    workers: _Count
    hosts: _Count
    slice_size: Optional[Annotated[int, Meta(ge=1, le=MAX_SLICE_ELEMS)]] = None
    """As in `Settings`."""

    @property
    def in_words(self) -> str:
        """The job for which it was measured."""
        return f"{counted(self.workers, 'worker')} on {counted(self.hosts, 'host')}"

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """Reads a file; ConfigError for one that can't be read, or is none of p3kv tune's."""
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=cls)
        except OSError as error:
            raise ConfigError(f"can't read '{path}': {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"'{path}' is no file of p3kv tune's: {error}; write it with 'p3kv tune --write'"
            ) from None

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all; ConfigError where it can't be written."""
        self.check_writable(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        text = msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
        try:
            unfinished.write_bytes(text)
            os.replace(unfinished, path)
        except OSError as error:
            raise ConfigError(f"can't write '{path}': {error.strerror}") from None

    @classmethod
    def check_writable(cls, path: Path) -> None:
        """Raises ConfigError where `write` could not write, or would replace another file."""
        if path.exists():
            cls.read(path)
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ConfigError(f"can't write '{path}': {error.strerror}") from None

    def environment(self, environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
        """Environment of a tuned job's processes; what the user has set here stays."""
        size = {} if self.slice_size is None else {variable_of("slice_size"): str(self.slice_size)}
        return {**size, **environ, **told_of(environ)}
