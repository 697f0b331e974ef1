"""What the keys of a server share: rules, optimizers, who has left, clipped steps, memory; and how
one key is treated."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import numpy as np

from p3kv.codecs import GRADIENTS, VALUES, Codec, Encoder, Identity, make_codecs
from p3kv.codecs.zero_rows import LEAST_BYTES, ZeroRows
from p3kv.consistency import Consistency, consistency_of_key
from p3kv.errors import ProtocolError
from p3kv.server.optimizer import Optimizer
from p3kv.slicing import BUCKET, make_layout
from p3kv.wire.messages import UNKNOWN, DeclaredKey, JobSettings, Vote, called, sum_dtype


class Buffer:
    """The elements of one slice, and whether a frame still needs them.

    A buffer goes back to its pool when it is retired and no frame is being sent from it.
    """

    __slots__ = ("_pool", "array", "bytes", "is_retired", "kind", "sends")

    def __init__(self, pool: BufferPool, length: int, dtype: np.dtype) -> None:
        self._pool = pool
        self.kind = (length, dtype)
        self.array = np.empty(length, dtype)
        self.bytes = self.array.view(np.uint8).data
        self.is_retired = False
        self.sends = 0
        """How many frames still need the elements as they are."""

    def begin_send(self) -> None:
        """Keeps the elements until `end_send`."""
        self.sends += 1

    def end_send(self) -> None:
        """Undoes one `begin_send`."""
        self.sends -= 1
        if self.is_retired and not self.sends:
            self._pool.put(self)

    def retire(self) -> None:
        """Says that only frames being sent need the elements."""
        self.is_retired = True
        if not self.sends:
            self._pool.put(self)


class BufferPool:
    """Buffers by length and dtype, reused and not returned to the operating system. Belongs to one
    thread."""

    def __init__(self) -> None:
        self._free: Dict[Tuple[int, np.dtype], List[Buffer]] = {}

    def get(self, length: int, dtype: np.dtype) -> Buffer:
        """A buffer of `length` elements, not initialised."""
        free = self._free.get((length, dtype))
        if free:
            buffer = free.pop()
            buffer.is_retired = False
            return buffer
        return Buffer(self, length, dtype)

    def cast(self, buffer: Buffer, dtype: np.dtype) -> Buffer:
        """The elements in another buffer, and of another dtype perhaps; the first is retired."""
        copy = self.get(len(buffer.array), dtype)
        with np.errstate(over="ignore"):
            copy.array[:] = buffer.array
        buffer.retire()
        return copy

    def clear(self) -> None:
        """Returns unused buffers to the operating system."""
        self._free.clear()

    def put(self, buffer: Buffer) -> None:
        """Takes back a buffer that nobody uses."""
        self._free.setdefault(buffer.kind, []).append(buffer)


class ClippedStep:
    """This server's part of a step that is held until all of its gradients are judged: by their
    norm, and by what workers say."""

    def __init__(self) -> None:
        self.held: List[Any] = []
        """Rounds whose sums are complete, in the order in which they became so."""
        self.squares: List[float] = []
        """Numbers whose sum is that of these sums' squares."""
        self.share = 1.0
        """Number of workers, divided by the sum of their weights."""
        self.complete_elems = 0
        self.pushed_elems: Optional[int] = None
        """Elements that worker rank 0 has pushed in the step, once it has pushed all."""
        self.scale: Optional[float] = None
        """Factor of all sums, once worker rank 0 has decided."""
        self.is_dropped = False
        """Whether all sums are dropped, and change nothing."""
        self.unscaled_elems = 0


class ClippedSteps:
    """Steps whose rounds are held until worker rank 0 has said how their gradients are scaled, or
    that they are dropped: their rounds end, and change nothing.

    A step is rank 0's: each round belongs to the step in which rank 0 has pushed for it. Rank 0
    says that a step is clipped before its first slice, and how many elements it has pushed to this
    server after the last. When the sums of all these elements are complete, the sum of their
    squares goes to rank 0, which has those of all servers and so the norm. Where any worker may
    have a step be dropped, each votes on one server, as in a two-phase commit.
    """

    def __init__(self, workers: int, exact: bool) -> None:
        """`exact`: sums of squares must not depend on slices and servers."""
        self.steps: Dict[int, ClippedStep] = {}
        """By number; mostly none."""
        self.complete: List[int] = []
        """Steps whose squares are to go to worker rank 0."""
        self._votes: Dict[Tuple[int, int], Dict[int, Vote]] = {}
        """By store and number of a step, the votes of the ranks that have voted. Not by the step: a
        checkpoint may have rank 0 count one more than the others."""
        self._workers = workers
        self._exact = exact

    def begin(self, step: int) -> None:
        """Holds a step's rounds from now on, before its first slice has come."""
        if step in self.steps:
            raise ProtocolError(f"it began the clipped step {step} twice")
        self.steps[step] = ClippedStep()

    def end_pushes(self, step: int, elems: int) -> None:
        """Notes how much rank 0 has pushed here in a step, of which nothing more comes."""
        clipped = self._known(step)
        if clipped.pushed_elems is not None:
            raise ProtocolError(f"it ended the clipped step {step} twice")
        clipped.pushed_elems = elems
        self._look(step, clipped)

    def count(
        self, step: int, round: Any, elems: int, total: Optional[np.ndarray], share: float = 1.0
    ) -> None:
        """Count a held round's sum, None without a gradient. `share`: number of workers, divided by
        the sum of their weights."""
        clipped = self.steps[step]
        clipped.share = share
        clipped.held.append(round)
        clipped.complete_elems += elems
        if total is not None:
            if self._exact:
                clipped.squares += exact_squares(total)
            else:
                clipped.squares = [sum(clipped.squares) + sum_of_squares(total)]
        self._look(step, clipped)

    def vote(self, store: int, number: int, rank: int, vote: Vote) -> Dict[int, Vote]:
        """Takes a worker's vote on a step; returns all that have come, by rank."""
        votes = self._votes.setdefault((store, number), {})
        if rank in votes:
            raise ProtocolError(f"worker {rank} voted twice on the clipped step {number}")
        votes[rank] = vote
        if len(votes) == self._workers:
            del self._votes[store, number]
        return votes

    def not_voted(self, store: int) -> List[int]:
        """Ranks whose votes lack on the oldest of a store's steps on which others have voted."""
        for (of_store, _), votes in self._votes.items():
            if of_store == store:
                return [rank for rank in range(self._workers) if rank not in votes]
        return []

    def scaled(self, step: int, scale: float, is_dropped: bool = False) -> List[Any]:
        """Take a step's factor, or that it is dropped; return the rounds that waited for it."""
        clipped = self._known(step)
        if clipped.complete_elems != clipped.pushed_elems or clipped.scale is not None:
            raise ProtocolError(f"it scaled the clipped step {step}, whose norm is not known")
        clipped.scale, clipped.is_dropped = scale, is_dropped
        clipped.unscaled_elems = clipped.complete_elems
        if not clipped.held:
            del self.steps[step]
        return clipped.held

    def changes(self, step: int) -> bool:
        """Whether `scale` changes sums of a step."""
        clipped = self.steps[step]
        return clipped.scale != 1.0 and not clipped.is_dropped

    def scale(
        self, step: int, elems: int, total: Optional[np.ndarray], out: Optional[np.ndarray]
    ) -> bool:
        """Scale the sum of a counted round, if any, into `out`; return whether it is not
        dropped."""
        clipped = self.steps[step]
        assert clipped.scale is not None
        if total is not None and self.changes(step):
            with np.errstate(invalid="ignore", under="ignore"):
                np.multiply(total, total.dtype.type(clipped.scale), out=out)
        clipped.unscaled_elems -= elems
        if clipped.unscaled_elems == 0:
            del self.steps[step]
        return not clipped.is_dropped

    def _known(self, step: int) -> ClippedStep:
        clipped = self.steps.get(step)
        if clipped is None:
            raise ProtocolError(f"it speaks of the clipped step {step}, which has not begun")
        return clipped

    def _look(self, step: int, clipped: ClippedStep) -> None:
        if clipped.pushed_elems is None:
            return
        if clipped.complete_elems > clipped.pushed_elems:
            raise ProtocolError(
                f"it pushed more than the {clipped.pushed_elems} elements that it has announced in "
                f"the clipped step {step}"
            )
        if clipped.complete_elems == clipped.pushed_elems > 0:
            self.complete.append(step)


_BITS = 24
"""Bits of a part: sums of up to 2**29 integers below 2**24 are exact in float64."""
_LEAST = -960
"""Exponent of two below which all is left out: the inverse must be a float64."""


def sum_of_squares(array: np.ndarray) -> float:
    """Sum the squares in the array's dtype; in float64 where that overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(array, array))
    return total if math.isfinite(total) else float(np.square(array, dtype=np.float64).sum())


def exact_squares(array: np.ndarray) -> List[float]:
    """Return numbers whose sum is that of the array's squares, without any rounding.

    So the sum does not depend on how a tensor is cut. A square is cut at fixed powers of two into
    integers of at most 24 bits, and integers of the same weight are summed, as in reproducible
    summation (Demmel and Nguyen, ARITH 2013). Squares of float64 are rounded to float64 first.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = np.square(array, dtype=np.float64)
    most = float(squares.max(initial=0.0))
    if not math.isfinite(most):
        return [most]
    parts = []
    weight = math.frexp(most)[1] // _BITS * _BITS
    while weight >= _LEAST and squares.any():
        whole = np.floor(squares * 2.0**-weight)
        parts.append(math.ldexp(float(whole.sum()), weight))
        squares -= whole * 2.0**weight
        weight -= _BITS
    return parts


class ServerState:
    """What holds for all keys of a server. Belongs to the server's thread."""

    link_s: Callable[[], float] = float
    """Seconds that the link takes for a byte, as far as is known."""

    def __init__(self, rank: int, rule: Consistency, job: JobSettings) -> None:
        """`rank` is this server's, `rule` that of keys which have none of their own."""
        self.rank = rank
        self.rule = rule
        self.num_workers = rule.num_workers
        self.deterministic = job.deterministic
        """Whether gradients are summed in rank order, and not as they come."""
        self.checks_finite = job.check_finite
        """Whether nan and infinity in a sum raise NotFinite. The sum is checked after each push:
        the first one after which it is bad says whose gradient it was."""
        self.leaves_zero_rows_out = job.leave_zero_rows_out
        """Whether values may travel without rows that have not changed."""
        self.workers_may_leave = job.let_workers_leave
        """Whether rounds go on without workers that have left, where they can."""
        self.pool = BufferPool()
        self.optimizers: Dict[int, Optimizer] = {}
        """By store. In a store without an optimizer, a round's sum is its value."""
        self.clipped = ClippedSteps(self.num_workers, job.deterministic)
        self.has_clipped = False
        """Whether any step's gradients have been clipped."""
        self.left: Set[int] = set()
        """Ranks of workers that have left, and for which no round waits."""
        self.gone: Set[int] = set()
        """Ranks of all that have left, whether or not rounds wait for them."""
        self.goes_on_without_rank_0 = False
        """Whether a round has ended for which worker rank 0 had left."""
        self.in_flight: Dict[Any, None] = {}
        """Rounds of all records from their first push to their answer, the oldest first."""


class KeyPlan:
    """How a server treats a key, as far as its declaration tells."""

    def __init__(self, declared: DeclaredKey, state: ServerState) -> None:
        """Raises ConfigError if the key's layout, a codec or its consistency is not known here,
        ProtocolError for runs that are none of this layout, or of which this server keeps nothing.
        """
        kept_elems = dict(declared.runs).get(state.rank)
        if kept_elems is None:
            raise ProtocolError(f"server {state.rank} keeps nothing of key {declared.key!r}")
        self.declared = declared
        self.key_id = declared.key_id
        self.state = state
        self.called = called(declared.key, declared.name)
        """The key's name in messages to users."""
        self.rule = rule = consistency_of_key(declared.consistency, state.rule)
        self.own_rounds = rule.own_rounds
        self.num_workers = rule.num_workers
        self.optimizer = state.optimizers.get(declared.store)
        self.layout = make_layout(declared.layout, declared.shape)
        self._check_layout()
        self.kept_elems = kept_elems
        """How many elements this server keeps."""
        before = declared.runs[: [server for server, _ in declared.runs].index(state.rank)]
        self.first_elem = sum(length for _, length in before)
        """Where they begin in the tensor."""
        self.dtype = np.dtype(declared.dtype)
        self.sum_dtype = sum_dtype(self.dtype)
        """Whether the optimizer takes sums as they are is not known when a round's first push
        arrives: another worker may be ahead of rank 0's settings."""
        names = declared.codecs
        self.codecs = make_codecs(names.gradients, names.values, kept_elems, self.dtype)
        self.decoder = self.codecs.gradients.decoder(GRADIENTS)
        self.zero_rows = self._zero_rows(self.codecs.values)
        """Where values may travel without rows that a round has not changed."""
        self._encoders: Dict[int, Encoder] = {}
        self.sums_on_hosts = False
        """Whether workers of a host have sent sums of theirs."""

    def _check_layout(self) -> None:
        declared, layout = self.declared, self.layout
        if not layout.has_whole_grains(declared.runs):
            raise ProtocolError(
                f"the runs {declared.runs} of {self.called} break grains of "
                f"{layout.grain_elems} elements, which the layout {declared.layout!r} keeps "
                "together"
            )
        if bool(declared.members) != (declared.layout == BUCKET):
            raise ProtocolError(
                f"{self.called} of the layout {declared.layout!r} has "
                f"{len(declared.members)} tensors"
            )
        if declared.initial is not None and not layout.touched_only:
            raise ProtocolError(f"initial rows of {self.called}, which is no key of rows")

    def _zero_rows(self, codec: Codec) -> Optional[ZeroRows]:
        may = self.state.leaves_zero_rows_out and not (self.own_rounds or self.rule.predicts)
        large = self.kept_elems * self.dtype.itemsize >= LEAST_BYTES
        if not may or not large or self.layout.touched_only or not isinstance(codec, Identity):
            return None
        what = f"values of {self.called}"
        return ZeroRows(codec, self.declared.shape, self.state.link_s, what)

    @property
    def lacks_settings(self) -> bool:
        """Whether rank 0 has not begun a step with the optimizer: settings such as a scheduler's
        rate come with its first step, and other workers may push before."""
        return self.optimizer is None or not self.optimizer.in_step

    def encoder(self, rank: int = UNKNOWN) -> Encoder:
        """Encoder of values for a worker, or for all where they get the same."""
        encoder = self._encoders.get(rank)
        if encoder is None:
            encoder = self._encoders[rank] = self.codecs.values.encoder(VALUES)
        return encoder
