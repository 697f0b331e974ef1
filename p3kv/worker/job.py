"""A process's tie to its job: the scheduler, the worker's loop, and the job's failure."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any, Callable, Optional, Sequence

from p3kv.errors import ClosedError, P3Error, ProtocolError
from p3kv.wire.control import ControlClient
from p3kv.wire.loop import Loop


class JobMember:
    """What all parts of a worker have of its job. From any thread. What waits raises the job's
    failure once there is one."""

    control: ControlClient

    def __init__(self) -> None:
        self.loop = Loop()
        """That of the worker's thread."""
        self.changed = threading.Condition()
        """Notified when the job fails, and of other news for which a thread waits."""
        self.failure: Optional[P3Error] = None
        """The job's failure, if there is one."""
        self.has_left = False
        self.byes_left = 0
        """How many servers and neighbours have not answered this worker's goodbye."""

    @property
    def usable(self) -> bool:
        """Whether the job has not failed, and this process has not left it."""
        return self.failure is None and not self.has_left

    def check(self) -> None:
        """Raises the job's failure, if there is one, or ClosedError."""
        if self.failure is not None:
            raise self.failure
        if self.has_left:
            raise ClosedError("this worker has left its job, and trains no more with p3kv")

    def wait(self, seconds: float) -> None:
        """Waits for some seconds, or until there is news."""
        with self.changed:
            self.check()
            self.changed.wait(seconds)

    def ask(self, function: Callable[..., None], *arguments: Any) -> Future[Any]:
        """Have the worker's thread call `function(answer, *arguments)`; return the answer, which
        the job's failure completes, too."""
        self.check()
        answer: Future[Any] = Future()
        self.loop.call_soon(self._ask, answer, function, arguments)
        return answer

    def _ask(
        self, answer: Future[Any], function: Callable[..., None], arguments: Sequence[Any]
    ) -> None:
        if self.failure is not None:
            answer.set_exception(self.failure)
        else:
            function(answer, *arguments)

    def goodbye_answered(self) -> None:
        """A server or neighbour has received all frames of this worker."""
        with self.changed:
            self.byes_left -= 1
            self.changed.notify_all()

    def server_says_goodbye(self) -> None:
        """A server's last frame is read. Not before: closing a connection with unread bytes would
        reset it, and lose frames that are under way."""
        if not self.has_left:
            raise ProtocolError("it said goodbye before this worker did")
        self.goodbye_answered()

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Waits until all have answered this worker's goodbye, or the job fails, or time is up."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while self.byes_left and self.failure is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self.changed.wait(left_s):
                    break
