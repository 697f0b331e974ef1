"""How a server treats a key: planned when the key is declared, and again when something new holds
for the whole job. No push of a key is asked what only others need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import numpy as np

from p3kv.codecs import GRADIENTS, VALUES, Codec, Encoder, Identity, make_codecs
from p3kv.codecs.zero_rows import LEAST_BYTES, ZeroRows
from p3kv.consistency import Consistency, consistency_of_key
from p3kv.errors import ProtocolError
from p3kv.server.engine.buffers import BufferPool
from p3kv.server.engine.held_rounds import HeldRounds
from p3kv.server.engine.leavers import Leavers
from p3kv.server.engine.rounds import Round
from p3kv.server.optimizer import Optimizer
from p3kv.slicing import BUCKET, make_layout
from p3kv.wire.messages import UNKNOWN, DeclaredKey, called, sum_dtype

Hold = Callable[[Any, Round], bool]
"""Whether a unit's round must not end yet, though all workers have pushed for it."""


@dataclass(eq=False)
class Rules:
    """Rules for all keys of a server."""

    rank: int
    """This server's."""
    consistency: Consistency
    held_rounds: HeldRounds
    deterministic: bool = False
    """Whether gradients are summed in rank order, and not as they come."""
    checks_finite: bool = False
    """Whether nan and infinity in a sum raise NotFinite. What is checked is the sum after each
    push, since the first one that is bad says whose gradient it was."""
    leaves_zero_rows_out: bool = True
    """Whether values may travel without rows that have not changed."""
    link_s: Callable[[], float] = float
    """Seconds that the link takes for a byte, as far as is known."""
    pool: BufferPool = field(default_factory=BufferPool)
    leavers: Leavers = field(default_factory=Leavers)
    open_rounds: Dict[Round, int] = field(default_factory=dict)
    """Rounds of all units that have begun and wait for something, the oldest first, with their
    keys' ids. A round that has ended is here while its worker waits for others."""
    optimizers: Dict[int, Optimizer] = field(default_factory=dict)
    """By the store's number. In a store without an optimizer, a round's sum is its value."""


class KeyPlan:
    """Decisions made once for all units of a key on a server."""

    def __init__(self, declared: DeclaredKey, rules: Rules) -> None:
        """Raises ConfigError if the key's layout, a codec or its consistency is not known here,
        ProtocolError for runs that are none of this layout, or of which this server keeps nothing.
        """
        kept_elems = dict(declared.runs).get(rules.rank)
        if kept_elems is None:
            raise ProtocolError(f"server {rules.rank} keeps nothing of key {declared.key!r}")
        self.declared = declared
        self.key_id = declared.key_id
        self.store = declared.store
        self.rules = rules
        self.called = called(declared.key, declared.name)
        """The key's name in messages to users."""
        self.consistency = consistency_of_key(declared.consistency, rules.consistency)
        self.num_workers = self.consistency.num_workers
        self.layout = make_layout(declared.layout, declared.shape)
        if not self.layout.has_whole_grains(declared.runs):
            raise ProtocolError(
                f"the runs {declared.runs} of {self.called} break grains of "
                f"{self.layout.grain_elems} elements, which the layout {declared.layout!r} keeps "
                "together"
            )
        if bool(declared.members) != (declared.layout == BUCKET):
            raise ProtocolError(
                f"{self.called} of the layout {declared.layout!r} has "
                f"{len(declared.members)} tensors"
            )
        if declared.initial is not None and not self.layout.touched_only:
            raise ProtocolError(f"initial rows of {self.called}, which is no key of rows")
        self.kept_elems = kept_elems
        """How many elements this server keeps."""
        ranks = [server for server, _ in declared.runs]
        before = declared.runs[: ranks.index(rules.rank)]
        self.first_elem = sum(length for _, length in before)
        """Where they begin in the tensor."""
        self.dtype = np.dtype(declared.dtype)
        self.sum_dtype = sum_dtype(self.dtype)
        """Whether the optimizer takes sums as they are is not known when a round's first push
        arrives: another worker may be ahead of rank 0's settings."""
        names = declared.codecs
        self.codecs = make_codecs(names.gradients, names.values, self.kept_elems, self.dtype)
        self.decoder = self.codecs.gradients.decoder(GRADIENTS)
        self.zero_rows = self._zero_rows(self.codecs.values)
        """Where values may travel without rows that a round has not changed."""
        self._encoders: Dict[int, Encoder] = {}
        self.sums_on_hosts = False
        """Whether workers of a host have sent sums of theirs."""
        self.holds: Tuple[Hold, ...] = ()
        """Functions that hold complete rounds back, but the initial one; mostly none."""

    def _zero_rows(self, codec: Codec) -> Optional[ZeroRows]:
        rule, rules = self.consistency, self.rules
        may = rules.leaves_zero_rows_out and not (rule.own_rounds or rule.predicts)
        large = self.kept_elems * self.dtype.itemsize >= LEAST_BYTES
        if not may or not large or self.layout.touched_only or not isinstance(codec, Identity):
            return None
        return ZeroRows(codec, self.declared.shape, rules.link_s, f"values of {self.called}")

    @property
    def optimizer(self) -> Optional[Optimizer]:
        """Optimizer of the key's store."""
        return self.rules.optimizers.get(self.store)

    @property
    def lacks_settings(self) -> bool:
        """Whether worker rank 0 has not begun a step with the store's optimizer. Settings such as
        the batch size and a scheduler's rate come with its first step; other workers may push
        before it."""
        return self.optimizer is None or not self.optimizer.in_step

    def encoder(self, rank: int = UNKNOWN) -> Encoder:
        """Encoder of values for a worker, or for all where they get the same."""
        encoder = self._encoders.get(rank)
        if encoder is None:
            encoder = self._encoders[rank] = self.codecs.values.encoder(VALUES)
        return encoder

    def ends(self, number: int, arrived: Set[int]) -> bool:
        """Whether a shared round ends, which is not the initial one, now that these workers have
        pushed."""
        leavers = self.rules.leavers
        if not leavers.ranks:  # asked after each push
            return len(arrived) == self.num_workers
        return leavers.ends(self.num_workers, number, arrived, self.optimizer)

    def missing(self, number: int, arrived: Set[int]) -> List[int]:
        """Ranks for whose pushes a shared round waits."""
        return self.rules.leavers.missing(self.num_workers, number, arrived, self.optimizer)

    def optimizer_of(self, current: Round) -> Optional[Optimizer]:
        """Optimizer of the key's store, which knows how many workers a round's sum is without."""
        rules = self.rules
        optimizer = rules.optimizers.get(self.store)
        if rules.leavers.ranks and optimizer is not None and not self.consistency.own_rounds:
            optimizer.absent = rules.leavers.absent(current.arrived)
        return optimizer

    def update_step(self, current: Round) -> Optional[int]:
        """The step whose optimizer settings hold for a round; None for the newest settings. Steps
        are worker rank 0's: other workers' own rounds go by the last one of which something is
        updated here."""
        if not self.consistency.own_rounds:
            leavers = self.rules.leavers  # mostly nobody
            newest = leavers.ranks and leavers.leads_no_more(current.arrived)
            return None if newest else current.step
        if current.owner == 0 or self.optimizer is None:
            return current.step
        return self.optimizer.last_step
