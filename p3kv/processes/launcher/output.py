"""Many processes' output in one place: each line whole, and marked with who wrote it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import shutil
import threading
import time
from typing import IO, BinaryIO, Callable, NamedTuple, TextIO

from p3kv.config import wants_colours

_READ_BYTES = 1 << 16
_LINE_CAP_BYTES = 1 << 20
_PROGRESS_EVERY_S = 10.0
_DRAIN_S = 2.0
_COLOURS = (32, 36, 35, 33, 34, 31)
_ERASE_LINE = b"\r\x1b[K"
_ERROR = re.compile(rb"p3kv (?:(?:worker|server|scheduler): )?((?:worker|server|scheduler)\b.*)")
"""Words of a job's process about its failure, or another's."""


class Text(NamedTuple):
    """A line without its end; `final` is false for progress that later text overwrites."""

    text: bytes
    final: bool


class LineSplitter:
    """Cuts one stream into lines, without doing any I/O.

    Progress bars end their text with a carriage return, or begin it with one, and end the line
    only when they are done. What stands on such a line is progress; what stands there when the
    newline comes is a line like any other.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._is_progress = False

    def feed(self, data: bytes) -> list[Text]:
        """Returns what `data` completes: all lines, and of the progress only the newest."""
        *lines, rest = (self._buffer + data).split(b"\n")
        texts = [Text(self._shown(line), True) for line in lines]
        if lines:
            self._is_progress = False
        if b"\r" in rest:
            self._is_progress = True
            # The newest text that is not overwritten by nothing: "50 %\r" still shows "50 %". A
            # last \r stays, since a newline may follow it.
            rest = self._shown(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if self._is_progress and data and rest.strip(b"\r"):
            texts.append(Text(rest.rstrip(b"\r"), False))
        if len(rest) > _LINE_CAP_BYTES:
            texts.append(Text(rest, True))
            rest = b""
        self._buffer = rest
        return texts

    def end(self) -> list[Text]:
        """Returns the last line, when the stream ended in the middle of it."""
        shown = self._shown(self._buffer)
        self._buffer = b""
        return [Text(shown, True)] if shown else []

    @staticmethod
    def _shown(line: bytes) -> bytes:
        return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """Where everything is shown: two streams, often the same terminal.

    On a terminal, progress stays in the last line and is overwritten, as its writer meant it. In a
    file or a pipe it would be one endless line, so it appears there now and then and when it is
    complete. Why a job fails, all its processes say: the first one is shown, and the others are
    named at the end. Any thread may use a screen.

    What a stream does not take, because its disk is full, for example, is lost, and the other
    stream says so: a job is worth more than its output. But if a pipe's reader is gone, `show`
    raises BrokenPipeError.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        """The streams must have no buffers: what one does not take would go to it again."""
        self._streams = (out, err)
        self._loses = [False, False]
        self._is_tty = tuple(_is_tty(stream) for stream in self._streams)
        self._has_colours = wants_colours()
        self._lock = threading.Lock()
        self._progress = b""
        self._progress_of = b""
        self._progress_at_s: dict[bytes, float] = {}
        self._first: dict[tuple[bool, bytes], str] = {}
        """Who has said first why the job fails, by stream and words."""
        self._same: dict[str, set[str]] = {}
        """Who has said the same as a process that is shown; the launcher says so at the end."""

    def show(self, to_err: bool, name: str, colour: int, texts: list[Text]) -> None:
        """Shows texts of one writer on `err` or `out`; `colour` counts the writers."""
        with self._lock:
            prefix = f"{name} | ".encode()
            texts = [text for text in texts if not self._is_repeated(to_err, name, text)]
            if self._is_tty[to_err]:
                number = _COLOURS[colour % len(_COLOURS)]
                shown = b"\x1b[%dm%s\x1b[0m" % (number, prefix) if self._has_colours else prefix
                self._show_on_tty(to_err, shown, len(prefix), texts)
            else:
                self._show_in_file(to_err, prefix, texts)

    def say(self, line: str) -> None:
        """Shows a line of the launcher itself on `err`."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._write(True, (_ERASE_LINE if self._progress else b"") + line.encode() + b"\n")
            self._progress = b""

    def say_what_is_folded(self) -> None:
        """Shows which processes have said what another one had said."""
        for first, others in self._same.items():
            self.say(f"p3kv launch: {', '.join(sorted(others))} said the same as {first}")
        self._first.clear()
        self._same.clear()

    def _is_repeated(self, to_err: bool, name: str, text: Text) -> bool:
        error = _ERROR.fullmatch(text.text) if text.final else None
        if error is None:
            return False
        first = self._first.setdefault((to_err, error[1]), name)
        if first == name:
            return False
        self._same.setdefault(first.strip(), set()).add(name.strip())
        return True

    def _show_on_tty(self, to_err: bool, prefix: bytes, width: int, texts: list[Text]) -> None:
        pieces = [_ERASE_LINE] if self._progress else []
        for text in texts:
            if text.final:
                pieces.append(prefix + text.text + b"\n")
                if self._progress_of == prefix:
                    self._progress = b""
            else:
                # A line that wraps cannot be erased with a carriage return.
                columns = max(1, shutil.get_terminal_size().columns - width - 1)
                cut = text.text.decode(errors="replace")[:columns].encode()
                self._progress, self._progress_of = prefix + cut, prefix
        pieces.append(self._progress)
        self._write(to_err, b"".join(pieces))

    def _show_in_file(self, to_err: bool, prefix: bytes, texts: list[Text]) -> None:
        now_s = time.monotonic()
        pieces = []
        for text in texts:
            if not text.final:
                if now_s - self._progress_at_s.setdefault(prefix, now_s) < _PROGRESS_EVERY_S:
                    continue
                self._progress_at_s[prefix] = now_s
            pieces.append(prefix + text.text + b"\n")
        if pieces:
            self._write(to_err, b"".join(pieces))

    def _write(self, to_err: bool, data: bytes) -> None:
        stream = self._streams[to_err]
        left = memoryview(data)
        try:
            while left:
                count = stream.write(left)
                if count is None:  # another process has made the terminal one that never blocks
                    select.select([], [stream], [])
                left = left[count or 0 :]
        except BrokenPipeError:
            raise
        except OSError as error:
            self._lose(to_err, error)
        else:
            self._loses[to_err] = False

    def _lose(self, to_err: bool, error: OSError) -> None:
        if not self._loses[to_err]:
            self._loses[to_err] = True
            what, why = ("output", "errors")[to_err], error.strerror or error
            line = f"p3kv launch: {what} can't be written, and what comes is lost: {why}\n"
            self._write(not to_err, line.encode())


class _Source(NamedTuple):
    stream: IO[bytes]
    to_err: bool
    name: str
    colour: int
    splitter: LineSplitter


class Forwarder:
    """The thread that reads processes' pipes and shows what comes. Calls `on_broken` once when the
    screen's reader is gone, and still reads: nobody blocks."""

    def __init__(self, screen: Screen, on_broken: Callable[[], None]) -> None:
        self._screen = screen
        self._on_broken = on_broken
        self._is_broken = False
        self._selector = selectors.DefaultSelector()
        self._stop_read_fd, self._stop_write_fd = os.pipe()
        self._selector.register(self._stop_read_fd, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def add(self, stream: IO[bytes], to_err: bool, name: str, colour: int) -> None:
        """Takes over a pipe's reading end, and closes it at its end. Only before `start`."""
        source = _Source(stream, to_err, name, colour, LineSplitter())
        self._selector.register(stream, selectors.EVENT_READ, source)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="p3kv-launch-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shows what is left in the pipes, then ends the thread."""
        if self._thread is not None:
            # A process that left its group may hold a pipe open for ever.
            self._thread.join(_DRAIN_S)
            os.write(self._stop_write_fd, b".")
            self._thread.join()
            self._thread = None
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.stream.close()
        self._selector.close()
        os.close(self._stop_read_fd)
        os.close(self._stop_write_fd)

    def _run(self) -> None:
        while len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._forward(key.data)

    def _forward(self, source: _Source) -> None:
        data = os.read(source.stream.fileno(), _READ_BYTES)
        texts = source.splitter.feed(data) if data else source.splitter.end()
        if texts and not self._is_broken:
            try:
                self._screen.show(source.to_err, source.name, source.colour, texts)
            except BrokenPipeError:
                self._is_broken = True
                self._on_broken()
        if not data:
            self._selector.unregister(source.stream)
            source.stream.close()


def unbuffered(stream: TextIO) -> BinaryIO:
    """The file of a stream, for as long as the stream is there."""
    return open(stream.fileno(), "wb", buffering=0, closefd=False)


def _is_tty(stream: BinaryIO) -> bool:
    return hasattr(stream, "isatty") and stream.isatty()
