"""The steps of a worker's store that have not ended, and the optimizer settings that they need."""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, Tuple

SendSettings = Callable[[int, int, bytes], None]
"""Sends settings to the servers: the step from which they hold, the oldest step that still needs
settings, and the settings."""


class Steps:
    """Counts each step's pushes until their rounds end, so that servers forget old settings.

    A key that is trained seldom, or a gradient that is late, may need the settings of an old step
    while other keys are far ahead. Only this worker knows what it will push, so only it knows which
    settings are still needed.

    Settings wait here until their step is the current or the next one, so that a script that pushes
    far ahead does not pile settings up on the servers. `pushed` belongs to the thread that pushes,
    all else to the worker's thread.
    """

    def __init__(self, send: SendSettings) -> None:
        self._send = send
        self._pushed: Dict[int, int] = {}
        self._ended: Dict[int, int] = {}
        # Each is written by one thread only.
        self._newest = 0
        self._oldest = 0
        self._begun = 0
        self._waiting: Deque[Tuple[int, bytes]] = deque()

    def pushed(self, step: int) -> None:
        """Counts a push of the newest step, before its transfer begins."""
        self._pushed[step] = self._pushed.get(step, 0) + 1
        self._newest = step

    def ended(self, step: int) -> None:
        """Takes note that the round of a push has ended on all its servers."""
        self._ended[step] = self._ended.get(step, 0) + 1

    def settings(self, from_step: int, settings: bytes) -> None:
        """Sends settings before the first slice of the step from which they hold."""
        self._waiting.append((from_step, settings))
        self._send_waiting()

    def begin(self, step: int) -> None:
        """Takes note that a step's first slice is about to be sent."""
        self._begun = step
        self._forget()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._begun + 1:
            self._forget()
            from_step, settings = self._waiting.popleft()
            self._send(from_step, self._oldest, settings)

    def _forget(self) -> None:
        """Steps before the newest get no more pushes."""
        while self._oldest < self._newest:
            if self._pushed.get(self._oldest, 0) != self._ended.get(self._oldest, 0):
                return
            self._pushed.pop(self._oldest, None)
            self._ended.pop(self._oldest, None)
            self._oldest += 1
