"""Has a thread write this process's part of a checkpoint, while training goes on."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import CancelledError
from typing import Callable, Optional

from p3kv.checkpoints.outline import Contents, Outline
from p3kv.checkpoints.writing import Abandoned, remove_unneeded, write
from p3kv.errors import in_one_line
from p3kv.wire.messages import UNKNOWN

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long to wait at the end of the job for a file that is being written."""


class Writer:
    """Writes one file after the other. Belongs to the thread that calls `begin`."""

    def __init__(self, written: Callable[[int, str], None]) -> None:
        """`written(step, problem)` is called by the thread of each file: it is written, or the
        reason why it is not."""
        self._written = written
        self._thread: Optional[threading.Thread] = None
        self._wanted = True

    def begin(
        self,
        folder: str,
        outline: Outline,
        contents: Callable[[], Contents],
        keep_from: int = UNKNOWN,
    ) -> None:
        """Begins a file, once the one before is written. `contents()` is called by the thread; it
        may wait, and raises CancelledError if nobody needs the file any more. A server's files of
        older steps than `keep_from` are removed; none where it is UNKNOWN."""
        self._thread = threading.Thread(
            target=self._write, args=(folder, outline, contents, keep_from),
            name="p3kv-checkpoint", daemon=True,
        )  # fmt: skip
        self._thread.start()

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            self._wanted = False
            self._thread.join()

    def _write(
        self, folder: str, outline: Outline, contents: Callable[[], Contents], keep_from: int
    ) -> None:
        problem = ""
        try:
            if keep_from != UNKNOWN:
                remove_unneeded(folder, outline.part, keep_from)
            write(folder, outline, contents(), lambda: self._wanted)
        except (Abandoned, CancelledError):
            return
        except Exception as error:  # noqa: BLE001  the job goes on without the file
            reason = error.strerror if isinstance(error, OSError) else in_one_line(error)
            problem = f"{os.path.join(folder, outline.part.name)}: {reason}"
            _log.warning(
                "the checkpoint of step %d can't be written to %s. The job goes on, keeps the "
                "checkpoint before and tries again at the next one.",
                outline.step, problem,
            )  # fmt: skip
        self._written(outline.step, problem)
