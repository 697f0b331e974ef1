"""Clipping by the norm of all gradients: worker rank 0 brings together what the servers have."""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from typing import Any, Callable, Collection, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection
from p3kv.wire.fields import NormHeader, ScaleHeader, StepHeader
from p3kv.wire.header import Kind
from p3kv.wire.messages import Norm, Scale, Squares, StepPushed, encode

_log = logging.getLogger(__name__)


class ClippedStep(NamedTuple):
    """A step of which a worker has pushed all keys."""

    store: int
    number: int
    """Number among the steps that the store has clipped, from 1: the same on all workers."""
    step: int
    max_norm: float
    """Infinity: the step is not clipped, and only its norm is computed."""
    elems: Mapping[int, int]
    """How many elements were pushed to each server, of those that got any."""
    epsilon: float = 1e-8
    """Added to the norm, by the framework's own number: a norm of zero scales nothing."""


class _Waiting:
    """A step whose norm is not known yet."""

    def __init__(self, clipped: ClippedStep) -> None:
        self.clipped = clipped
        self.missing: Set[int] = set(clipped.elems)
        self.squares: List[float] = []


class GlobalNorms:
    """Asks the servers for the squares of a step's sums, and tells them how to scale the sums.

    Servers have no connections with each other, and worker rank 0 is connected with all. It alone
    speaks here; what the others have pushed in a step follows from its own pushes. The other
    workers only hear the norm. Belongs to the worker's thread.
    """

    def __init__(self, rank: int, tell: Callable[..., None], servers: Collection[int]) -> None:
        """`tell(header, words, servers)` sends a frame without a slice. `servers` are the ranks of
        all servers, once they are connected."""
        self._rank = rank
        self._tell = tell
        self._servers = servers
        self._waiting: Dict[int, _Waiting] = {}
        """By step, in the order of steps."""
        self._norms: Dict[int, Tuple[int, float]] = {}
        """By store: the number of the newest step whose norm is known, and the norm."""
        self._asked: List[Tuple[int, int, Future[Any]]] = []
        """Store, number of a clipped step, and who waits for its norm."""
        self._finished: Optional[Future[Any]] = None
        self._finite = True

    def begin(self, step: int) -> None:
        """Has the servers hold a step's rounds, before the step's first slice is sent."""
        if self._rank == 0:
            self._tell(StepHeader(Kind.CLIPPED, self._rank, step=step))

    def end_pushes(self, clipped: ClippedStep) -> None:
        """Says that a step has no further pushes; their transfers may still be to begin."""
        if self._rank != 0:
            return
        self._waiting[clipped.step] = _Waiting(clipped)
        header = StepHeader(Kind.STEP_PUSHED, self._rank, step=clipped.step)
        for server in self._servers:
            self._tell(header, encode(StepPushed(clipped.elems.get(server, 0))), [server])

    def take_squares(self, connection: Connection, header: StepHeader, squares: Squares) -> None:
        """Takes a server's part of a norm."""
        waiting = self._waiting.get(header.step)
        if waiting is None or header.rank not in waiting.missing:
            raise ProtocolError(f"it sent squares of step {header.step}, for which nobody waits")
        waiting.missing.remove(header.rank)
        waiting.squares += squares.parts
        if not waiting.missing:
            self._scale(waiting)

    def take_norm(self, connection: Connection, header: NormHeader, norm: Norm) -> None:
        """Takes a step's norm."""
        self._norms[header.store] = (header.number, norm.norm)
        self._answer()

    def ask(self, store: int, number: int, answer: Future[Any]) -> None:
        """Answers with the norm of the step with a number, or of a later one."""
        self._asked.append((store, number, answer))
        self._answer()

    def finish(self, done: Future[Any]) -> None:
        """Completes `done` when the servers know how to scale each step."""
        self._finished = done
        self._answer()

    def fail(self, error: BaseException) -> None:
        """Ends what waits with an error."""
        self._waiting.clear()
        for _, _, answer in self._asked:
            answer.set_exception(error)
        self._asked.clear()
        if self._finished is not None:
            self._finished.set_exception(error)
            self._finished = None

    def _scale(self, waiting: _Waiting) -> None:
        """Tells the servers how to scale the sums of a step whose squares are all there."""
        clipped = waiting.clipped
        del self._waiting[clipped.step]
        norm = norm_of(waiting.squares)
        self._warn(norm, clipped)
        scale = 1.0
        if clipped.max_norm < math.inf:
            # A norm that is not a number stays none.
            scale = clipped.max_norm / (norm + clipped.epsilon)
            scale = 1.0 if scale > 1 else scale
        header = ScaleHeader(
            Kind.SCALE, self._rank, store=clipped.store, number=clipped.number, step=clipped.step
        )
        for server in self._servers:
            self._tell(header, encode(Scale(scale, norm, pass_on=server == 0)), [server])
        self._answer()

    def _answer(self) -> None:
        for asked in list(self._asked):
            store, number, answer = asked
            newest, norm = self._norms.get(store, (0, math.nan))
            if newest >= number:
                self._asked.remove(asked)
                answer.set_result(norm)
        if self._finished is not None and not self._waiting:
            self._finished.set_result(None)
            self._finished = None

    def _warn(self, norm: float, clipped: ClippedStep) -> None:
        if not math.isfinite(norm) and self._finite and clipped.max_norm < math.inf:
            _log.warning(
                "the norm of all gradients is %s in step %d: clipping makes the others 0 where a "
                "gradient is infinite, and all of them nan where one is nan",
                norm,
                clipped.step,
            )
        self._finite = math.isfinite(norm)


def norm_of(squares: List[float]) -> float:
    """The root of the exact sum of numbers."""
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
