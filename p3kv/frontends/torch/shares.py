"""Shares of batches by how fast each worker computes."""

from __future__ import annotations

import statistics
import time
from typing import Iterator, List, Optional, Protocol, Sequence, Sized

import torch

from p3kv.errors import ConfigError
from p3kv.worker.worker import Worker

_KEPT = 0.5
"""By which part of a speed that was measured before the next one is smoothed."""


class Pace:
    """How fast this worker computes: samples of its steps in the time in which its script does not
    wait for the others. Belongs to the script's thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.samples = 0.0
        """How many the script has told of the step."""
        self._ended_s: Optional[float] = None
        self._waited_s = 0.0
        """When the last step ended, and how long the script had waited by then."""
        self._times_s: List[float] = []
        """For a sample, in each step since the speed was taken."""
        self._speed = 0.0

    def step_ended(self) -> None:
        """A step has ended; without samples it is not measured."""
        now_s, waited_s = time.monotonic(), self._worker.script.waited_s
        samples, self.samples = self.samples, 0.0
        if self._ended_s is not None and samples:
            busy_s = now_s - self._ended_s - (waited_s - self._waited_s)
            self._times_s.append(max(busy_s, 1e-9) / samples)
        self._ended_s, self._waited_s = now_s, waited_s

    def shares(self) -> List[float]:
        """By rank, the part of a global batch that each worker should take; all call it."""
        speeds = [0.0] * self._worker.num_workers
        speeds[self._worker.rank] = self._newest_speed()
        return shares_of(self._worker.sums(speeds, "to share batches by speed"))

    def _newest_speed(self) -> float:
        """Samples a second, smoothed over the calls of this; 0.0 as long as nothing is known."""
        if self._times_s:
            # What the script does between epochs is in one step's time.
            newest = 1 / statistics.median(self._times_s)
            before = self._speed or newest
            self._speed = _KEPT * before + (1 - _KEPT) * newest
            self._times_s.clear()
        return self._speed


def shares_of(speeds: Sequence[float]) -> List[float]:
    """Shares that sum to 1; one of unknown speed gets the mean one's."""
    known = [speed for speed in speeds if speed]
    mean = sum(known) / len(known) if known else 1.0
    all_speeds = [speed or mean for speed in speeds]
    total = sum(all_speeds)
    return [speed / total for speed in all_speeds]


def parts_of(size: int, shares: Sequence[float]) -> List[int]:
    """Cuts a batch of at least one sample for each into whole numbers that are as near to shares of
    it as they can be."""
    parts = [max(1, int(share * size)) for share in shares]
    while sum(parts) != size:
        step = 1 if sum(parts) < size else -1
        lacks = [step * (share * size - part) for share, part in zip(shares, parts)]
        may = [at for at, part in enumerate(parts) if part + step >= 1]
        parts[max(may, key=lambda at: lacks[at])] += step
    return parts


class Shared(Protocol):
    """What the sampler asks of an optimizer."""

    @property
    def rank(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    def shares(self) -> List[float]: ...


class ShareSampler(torch.utils.data.Sampler[List[int]]):
    """Cuts each global batch into parts by the workers' speeds: the `batch_sampler` of a
    DataLoader.

    All workers get the same number of batches, in whose steps a worker that is half as fast has
    half as many samples. `optimizer.weigh(len(x))` before `backward` makes the update that of the
    global batch, however it is cut. Shares are asked for when an epoch begins, by all workers.
    """

    def __init__(
        self,
        dataset: Sized,
        optimizer: Shared,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """`batch_size` is that of all workers together, at least 1 for each; `optimizer` a
        `p3kv.torch.Optimizer`. With the same `seed` all workers shuffle alike, after
        `set_epoch(epoch)` in another order. What is left for the last batch makes one, unless
        `drop_last`, or if it has no sample for each worker.

        Raises ConfigError for another batch size.
        """
        workers = optimizer.num_workers
        if not isinstance(batch_size, int) or batch_size < workers:
            raise ConfigError(
                f"batch_size={batch_size!r} is that of all {workers} workers together: give a "
                f"whole number from {workers} on"
            )
        self._elements = dataset
        self._optimizer = optimizer
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Has the next epoch be shuffled otherwise, as DistributedSampler."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[List[int]]:
        shares, rank = self._optimizer.shares(), self._optimizer.rank
        number = len(self._elements)
        order = range(number)
        if self._shuffle:
            random = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(number, generator=random).tolist()
        for batch in range(len(self)):
            first = batch * self._batch_size
            parts = parts_of(min(self._batch_size, number - first), shares)
            start = first + sum(parts[:rank])
            yield list(order[start : start + parts[rank]])

    def __len__(self) -> int:
        batches, left = divmod(len(self._elements), self._batch_size)
        return batches + (not self._drop_last and left >= self._optimizer.num_workers)
