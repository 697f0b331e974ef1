"""Steps that are scaled by the norm of all gradients, or dropped: worker rank 0 brings together
what the servers have, and decides."""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection
from p3kv.wire.fields import NormHeader, ScaleHeader, StepHeader
from p3kv.wire.header import Kind
from p3kv.wire.messages import Norm, Scale, Squares, StepPushed, Vote, encode
from p3kv.worker.egress import Egress

_log = logging.getLogger(__name__)

_NONE = Norm(math.nan)
_OF_VOTES = 0
"""The server that counts votes, and passes norms on."""


class ClippedStep(NamedTuple):
    """A step whose keys a worker has all pushed."""

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
    factor: float = 1.0
    """All sums are multiplied by it before their norm counts: 1 / the scale of the loss."""
    drops_nonfinite: bool = False
    """Whether the step is dropped if the norm is not finite."""
    has_votes: bool = False
    """Whether each worker votes on it."""
    drops: bool = False
    """Whether it is dropped whatever its norm is: all workers' scripts say so."""


class _Waiting:
    """A step that is not decided yet."""

    def __init__(self, clipped: ClippedStep) -> None:
        self.clipped = clipped
        self.missing: Set[int] = set(clipped.elems)
        self.squares: List[float] = []
        self.norm: Optional[float] = None
        """Once it is known."""


class GlobalNorms:
    """Asks the servers for the squares of a step's sums, and tells them how to scale the sums.

    Servers have no connections with each other, and worker rank 0 is connected with all. It alone
    speaks here; what the others have pushed in a step follows from its own pushes. The other
    workers only vote, and hear the norm. Belongs to the worker's thread.
    """

    def __init__(self, rank: int, egress: Egress, servers: Collection[int]) -> None:
        """`servers` are the ranks of all servers, once they are connected."""
        self._rank = rank
        self._egress = egress
        self._servers = servers
        self._waiting: Dict[int, _Waiting] = {}
        """By step, in the order of steps."""
        self._norms: Dict[int, Tuple[int, Norm]] = {}
        """By store: the number of the newest step whose norm is known, and the norm."""
        self._votes: Dict[Tuple[int, int], bool] = {}
        """By store and number of a step, whether any worker drops it."""
        self._unvoted: Dict[int, ClippedStep] = {}
        """By store: a step on which this worker is still to vote."""
        self._asked: List[Tuple[int, int, bool, Future[Any]]] = []
        """Store, number of a clipped step, and who waits for its norm, or for what becomes of
        it."""
        self._finite = True

    def begin(self, step: int) -> None:
        """Has the servers hold a step's rounds, before the step's first slice is sent."""
        if self._rank == 0:
            self._egress.tell(StepHeader(Kind.CLIPPED, self._rank, step=step))

    def end_pushes(self, clipped: ClippedStep) -> None:
        """Says that a step has no further pushes; their transfers may still be to begin."""
        if clipped.has_votes:
            self._unvoted[clipped.store] = clipped
        if self._rank != 0:
            return
        self._waiting[clipped.step] = _Waiting(clipped)
        header = StepHeader(Kind.STEP_PUSHED, self._rank, step=clipped.step)
        for server in self._servers:
            self._egress.tell(header, encode(StepPushed(clipped.elems.get(server, 0))), [server])

    def vote(self, store: int, number: int, drops: bool, factor: float) -> None:
        """Send this worker's vote on dropping a step."""
        self._unvoted.pop(store, None)
        header = NormHeader(Kind.VOTE, self._rank, store=store, number=number)
        self._egress.tell(header, encode(Vote(drops, factor)), [_OF_VOTES])

    def drop_unmade(self, store: Optional[int] = None) -> None:
        """Votes against the open step of a store, or of all: the script does not make it."""
        for clipped in list(self._unvoted.values()):
            if store is None or clipped.store == store:
                self.vote(clipped.store, clipped.number, True, clipped.factor)

    def take_squares(self, connection: Connection, header: StepHeader, squares: Squares) -> None:
        """Takes a server's part of a norm."""
        waiting = self._waiting.get(header.step)
        if waiting is None or header.rank not in waiting.missing:
            raise ProtocolError(f"it sent squares of step {header.step}, for which nobody waits")
        waiting.missing.remove(header.rank)
        waiting.squares += squares.parts
        if not waiting.missing:
            # As if each worker counted alike: who asks divides by their number.
            waiting.norm = norm_of(waiting.squares) * waiting.clipped.factor * squares.share
            self._decide(waiting)

    def take_votes(self, connection: Connection, header: NormHeader, vote: Vote) -> None:
        """Takes what all workers have voted on a step."""
        self._votes[header.store, header.number] = vote.drops
        for waiting in list(self._waiting.values()):
            if (waiting.clipped.store, waiting.clipped.number) == (header.store, header.number):
                self._decide(waiting)

    def take_norm(self, connection: Connection, header: NormHeader, norm: Norm) -> None:
        """Takes a step's norm, and what becomes of the step."""
        self._norms[header.store] = (header.number, norm)
        self._answer()

    def ask(self, answer: Future[Any], store: int, number: int, decided: bool = False) -> None:
        """Answer with a step's norm, or a later one's; `decided`: with whether it is dropped."""
        self._asked.append((store, number, decided, answer))
        self._answer()

    @property
    def waits(self) -> bool:
        """Whether the servers wait to know how to scale a step."""
        return bool(self._waiting)

    def fail(self, error: BaseException) -> None:
        """Ends what waits with an error."""
        self._waiting.clear()
        for *_, answer in self._asked:
            answer.set_exception(error)
        self._asked.clear()

    def _decide(self, waiting: _Waiting) -> None:
        """Have servers scale a step's sums, or drop them, once norm and votes are there."""
        clipped, norm = waiting.clipped, waiting.norm
        if norm is None:
            return
        is_dropped = clipped.drops or (clipped.drops_nonfinite and not math.isfinite(norm))
        if clipped.has_votes:
            voted = self._votes.pop((clipped.store, clipped.number), None)
            if voted is None:  # a script may wait for the norm before it votes
                early = NormHeader(
                    Kind.NORM, self._rank, store=clipped.store, number=clipped.number
                )
                self._egress.tell(early, encode(Norm(norm)), [_OF_VOTES])
                return
            is_dropped = is_dropped or voted
        del self._waiting[clipped.step]
        if not is_dropped:
            self._warn(norm, clipped)
        scale = 1.0
        if clipped.max_norm < math.inf:
            # A norm that is not a number stays none.
            scale = clipped.max_norm / (norm + clipped.epsilon)
            scale = 1.0 if scale > 1 else scale
        scale *= clipped.factor
        header = ScaleHeader(
            Kind.SCALE, self._rank, store=clipped.store, number=clipped.number, step=clipped.step
        )
        for server in self._servers:
            told = Scale(scale, norm, server == _OF_VOTES, is_dropped)
            self._egress.tell(header, encode(told), [server])

    def _answer(self) -> None:
        for asked in list(self._asked):
            store, number, decided, answer = asked
            newest, norm = self._norms.get(store, (0, _NONE))
            if newest < number or (decided and norm.is_dropped is None):
                continue
            self._asked.remove(asked)
            answer.set_result(norm.is_dropped if decided else norm.norm)

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
