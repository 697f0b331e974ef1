"""Buckets: small parameters that are neighbours in the model, and travel as one key."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Union

import torch

from p3kv.frontends.torch.values.copies import Copies
from p3kv.frontends.torch.values.late import Late
from p3kv.wire.messages import MAX_MEMBERS
from p3kv.worker.transfers import WorkerKey

_MOST_ELEMS = 50_000
"""A bucket delays what is more urgent as a slice does (P3 section 5.6)."""


class Bucket:
    """Some parameters of one dtype, device and group: their gradients leave together as soon as the
    last one is there, and one value comes for all.

    A step may have gradients of some only: those that lack one push zeros and say so, and servers
    update the others. `arrived` is called in the worker's thread, all else in threads of the
    script.
    """

    is_table = False
    on_slice = None

    def __init__(self, key: WorkerKey, dtype: torch.dtype, copies: Copies) -> None:
        self.key = key
        self.copies = copies
        self.size_bytes = key.size_bytes
        self.staging = copies.empty((key.size_elems,), dtype)
        """Where the next value lands: each parameter's is a part of it."""
        self.there = threading.Event()
        self.taking = threading.Lock()
        """Both are the parameters', too."""
        self.there.set()
        self.members: List[Late] = []
        self.asleep = False
        """Whether nobody trains any of them."""

    def memory_of(self, member: int) -> torch.Tensor:
        """The part of the staging memory of the tensor with this number, from 1."""
        before = sum(one.size_elems for one in self.key.members[: member - 1])
        tensor = self.key.members[member - 1]
        return self.staging[before : before + tensor.size_elems].view(tensor.shape)

    @property
    def pushed(self) -> bool:
        """Whether this step's push has been called."""
        return self.members[0].pushed

    @property
    def has_gradient(self) -> bool:
        """Whether any gradient has been computed in this step."""
        return any(late.leaving is not None for late in self.members)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are there that this step will bring, as far as is known."""
        for late in self.members:  # the first one's usually comes last
            if late.leaving is None and late.parameter.requires_grad:
                return False
        return True

    @property
    def lacking(self) -> int:
        """Those of which there is no gradient in this step, a bit for each."""
        return sum(1 << at for at, late in enumerate(self.members) if late.leaving is None)

    def source(self) -> torch.Tensor:
        """All gradients in memory of their own, zeros where there is none."""
        gradients = []
        for late in self.members:
            late.pushed = True
            if late.leaving is None:
                gradients.append(torch.zeros_like(late.staging, device=late.device).view(-1))
            else:
                gradients.append(late.leaving.gradient.detach().reshape(-1))
        return torch.cat(gradients)

    def leaves_itself(self) -> None:
        """As `Late.leaves_itself`: the gradients were copied."""

    def lack_gradients(self) -> None:
        """This worker has none in this step."""
        for late in self.members:
            late.pushed = True

    def note_changes(
        self, round_: int, takes: Optional[int], changes: Optional[Future[bool]]
    ) -> None:
        """As `Late.note_changes`."""
        for late in self.members:
            late.note_changes(round_, takes, changes)

    def begin(self) -> None:
        """As `Late.begin`."""
        with self.taking:
            self.there.clear()
            for late in self.members:
                late.is_written = False

    def arrived(self, error: Optional[BaseException]) -> None:
        """The value is in the staging memory, or does not come."""
        for late in self.members:
            late.error = error
        self.there.set()

    def take(self) -> None:
        """As `Late.take`, of all."""
        for late in self.members:
            late.take()


Unit = Union[Late, Bucket]
"""What has a key, and travels by itself."""


class Joinable(NamedTuple):
    """A parameter that is to be declared."""

    number: int
    """Its place in the optimizer."""
    parameter: torch.nn.Parameter
    name: str
    group: Optional[int]
    """That of the optimizer; None: it can't be joined with others."""


def buckets_of(parameters: Iterable[Joinable], slice_elems: int) -> List[List[Joinable]]:
    """Which parameters travel together: neighbours that are alike, in the order of the first of
    each bucket. Every process finds the same.

    `parameters` are in the order in which the forward pass reads them. `slice_elems`: the elements
    of a slice.
    """
    most_elems = min(slice_elems, _MOST_ELEMS)
    found: List[List[Joinable]] = []
    last: Dict[Any, List[Joinable]] = {}
    for one in parameters:
        alike = one.group, one.parameter.dtype, one.parameter.device
        if one.group is None or not 0 < one.parameter.numel() <= most_elems:
            found.append([one])
            continue
        bucket = last.get(alike, [])
        elems = sum(other.parameter.numel() for other in (*bucket, one))
        if not bucket or len(bucket) == MAX_MEMBERS or elems > most_elems:
            bucket = last[alike] = []
            found.append(bucket)
        bucket.append(one)
    return found
