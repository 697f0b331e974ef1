"""Buckets: small parameters that are neighbours in the model, and travel as one key."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import torch

from p3kv.frontends.torch.values.copies import Copies
from p3kv.frontends.torch.values.late import Late, Travels
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
        for late in reversed(self.members):  # the first one's usually comes last
            if late.leaving is None and late.parameter.requires_grad:
                return False
        return True

    @property
    def lacking(self) -> int:
        """Those of which there is no gradient in this step, a bit for each."""
        return sum(1 << at for at, late in enumerate(self.members) if late.leaving is None)

    def source(self) -> Tuple[torch.Tensor, Travels]:
        """All gradients in memory of their own, zeros where there is none; and what is to be told
        whether the network reads the source itself."""
        gradients = []
        for late in self.members:
            late.pushed = True
            if late.leaving is None:
                gradients.append(torch.zeros_like(late.staging, device=late.device).view(-1))
            else:
                gradients.append(late.leaving.gradient.detach().reshape(-1))
        return torch.cat(gradients), _copied

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


def _copied(memory: Optional[torch.Tensor]) -> None:
    """Gradients were copied when they left."""


def buckets_of(
    parameters: Iterable[Tuple[int, torch.nn.Parameter, Any]], slice_elems: int
) -> List[List[int]]:
    """Which parameters travel together, by number; neighbours that are alike, in the order of the
    first of each bucket. Every process finds the same.

    `parameters`: each with its number and group, in the order in which the forward pass reads them;
    those that can't be joined have the group None. `slice_elems`: the elements of a slice.
    """
    most_elems = min(slice_elems, _MOST_ELEMS)
    found: List[List[int]] = []
    last: Dict[Any, List[int]] = {}
    sizes: Dict[int, int] = {}
    for at, parameter, group in parameters:
        elems = parameter.numel()
        if group is None or not 0 < elems <= most_elems:
            found.append([at])
            continue
        alike = (group, parameter.dtype, parameter.device)
        bucket = last.get(alike)
        full = bucket is None or len(bucket) == MAX_MEMBERS
        if bucket is None or full or sizes[id(bucket)] + elems > most_elems:
            bucket = last[alike] = []
            sizes[id(bucket)] = 0
            found.append(bucket)
        bucket.append(at)
        sizes[id(bucket)] += elems
    return found
