"""Buffers of a model, such as BatchNorm's running statistics: no gradient changes them, and all
workers have the same."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import List, Optional

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name then
import numpy as np
import torch

from p3kv.common.registry import Choice
from p3kv.errors import CheckpointError
from p3kv.frontends.torch.buffer_places import (
    AVERAGE,
    BROADCAST,
    OWN,
    Place,
    called,
    flat,
    kept,
    packed,
)
from p3kv.frontends.torch.optimizers.script_optimizer import TorchGoesOn
from p3kv.frontends.torch.pushes import pushes_of
from p3kv.frontends.torch.script_marks import waited
from p3kv.frontends.torch.values.copies import Copies
from p3kv.frontends.torch.values.devices import Devices
from p3kv.frontends.torch.values.late import have_back, have_wait
from p3kv.store.resuming import Resuming
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.saving.cuts import Unpushed
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Transfer, WorkerKey
from p3kv.worker.worker import Worker


class Buffers:
    """Has buffers travel after each step, in a store of sums. Belongs to the script's thread.

    `broadcast`: all workers have worker 0's. `average`: all have the mean of numbers with a
    fraction, and worker 0's of others. `own`: each goes on with its own. In any case all begin with
    worker 0's, and checkpoints have them.
    """

    def __init__(
        self, places: List[Place], how: str, worker: Worker, model: WorkerStore, devices: Devices
    ) -> None:
        """Sends worker rank 0's buffers to all, and waits for them. `model`: the store of the
        parameters, whose rule is that of buffers. A checkpoint from which it goes on must have
        them."""
        self._how = how
        self._worker = worker
        own = self._own = worker.new_store(model.consistency)
        own.choose_gradient_codec(Choice("identity"))
        pushes = pushes_of(own, worker.rank)  # whose counts say nothing here
        resuming = Resuming(own, pushes, worker.rank, TorchGoesOn(own))
        if model.resumed is not None and own.resumed is None:
            raise CheckpointError(
                "the checkpoint has no buffers, such as BatchNorm's running statistics, and the "
                "model has some; go on with the model that it was written of"
            )
        self._packs = [
            Pack(
                own.declare(at, (elems,), _name(dtype), called(together), "dense"),
                dtype,
                together,
                devices.copies(together[0].device),
            )
            for at, (dtype, elems, together) in enumerate(packed(places))
        ]
        if worker.rank == 0 and how != BROADCAST:  # or else the servers have these values
            own.unpushed = lambda: [pack.copied() for pack in self._packs]
        kept.update({place.where: self for place in places})
        for pack in self._packs:
            saved = resuming.initial(pack.key) if worker.rank == 0 else None
            if saved is not None:
                pack.scatter(_tensor(saved).to(pack.device))
            source = pack.gathered() if worker.rank == 0 else None
            self._begin(pack, INITIAL_ROUND, 0, source, lands=worker.rank != 0)
        self.wait()

    def push(self, step: int) -> None:
        """Has buffers be those of all workers for whoever reads them from now on, at the end of a
        step."""
        if self._how == OWN:
            return
        for pack in self._packs:
            pack.take()
            key = pack.key
            key.round += 1
            self._own.count_push(step)
            averages = self._averages(pack)
            source = pack.gathered() if averages or self._worker.rank == 0 else None
            lands = averages or self._worker.rank != 0
            self._begin(pack, key.round, step, source, lands)

    def wait(self) -> None:
        """Waits until all buffers are there."""
        for pack in self._packs:
            pack.take()

    def stop(self) -> None:
        """Another optimizer may take the buffers into its care."""
        self.wait()
        for where in [where for where, keeper in kept.items() if keeper is self]:
            del kept[where]

    def _averages(self, pack: Pack) -> bool:
        return self._how == AVERAGE and pack.dtype.is_floating_point

    def _begin(
        self, pack: Pack, round_: int, step: int, source: Optional[torch.Tensor], lands: bool
    ) -> None:
        key, averages = pack.key, self._averages(pack)
        pulls = round_ == INITIAL_ROUND and source is None
        asks = (key.ask(),) if pulls else key.asks()

        def begin(values: Optional[torch.Tensor]) -> None:
            if values is not None and step and not averages:
                values = pack.unless_sent(values)
            self._worker.begin(
                Transfer(
                    key, round_, step, 0,
                    values.data_ptr() if values is not None else None if pulls else 0,
                    pack.staging.data_ptr() if lands else None,
                    partial(pack.arrived if lands else _has_left, values), asks,
                    Future() if values is None and not pulls else None,
                    exact=True,
                )
            )  # fmt: skip

        pack.begin(lands, self._worker.num_workers if averages and step else 1)
        pack.copies.to_host(source, begin)


class Pack:
    """Some buffers of a dtype, one after the other, under one key."""

    def __init__(
        self, key: WorkerKey, dtype: torch.dtype, places: List[Place], copies: Copies
    ) -> None:
        self.key = key
        self.device = places[0].device
        self.copies = copies
        self.dtype = dtype
        """As it travels."""
        self.staging = copies.empty((key.size_elems,), dtype)
        self._sent: Optional[torch.Tensor] = None
        """The last value that this worker has sent for all."""
        self._places = places
        self._late: List[torch.Tensor] = []
        """Buffers whose values are under way."""
        self._copies: List[Future[np.ndarray]] = []
        """To be made when they are there."""
        self._divisor = 1
        self._there = threading.Event()
        self._error: Optional[BaseException] = None
        self._taking = threading.Lock()

    def gathered(self) -> torch.Tensor:
        """A copy of the buffers' values as they travel."""
        return torch.cat([flat(place.tensor).to(self.dtype) for place in self._places])

    def unless_sent(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        """Values that are to be sent for all; None if they are what was sent last."""
        if self._sent is not None and torch.equal(_bytes(values), _bytes(self._sent)):
            return None
        self._sent = values
        return values

    def scatter(self, values: torch.Tensor) -> None:
        """Writes values, which are on their device, into the buffers."""
        at = 0
        for place in self._places:
            buffer = place.tensor.data
            elems = buffer.numel() * (2 if buffer.is_complex() else 1)
            part = values.reshape(-1)[at : at + elems]
            if buffer.is_complex():
                part = torch.view_as_complex(part.reshape(-1, 2))
            buffer.copy_(part.reshape(buffer.shape))
            at += elems

    def copied(self) -> Unpushed:
        """A copy for a checkpoint, once the buffers are there."""
        value: Future[np.ndarray] = Future()
        if self._late:
            self._copies.append(value)
        else:
            value.set_result(_array(self.gathered()))
        shape = (self.key.size_elems,)
        return Unpushed(self.key.key, self.key.name or "", shape, _name(self.dtype), value)

    def begin(self, lands: bool, divisor: int) -> None:
        """From now on, whoever reads a buffer waits, if a value is to land."""
        if not lands:
            return
        self._there.clear()
        self._divisor = divisor
        self._late = list({id(place.tensor): place.tensor for place in self._places}.values())
        torch.autograd.graph.increment_version(self._late)
        self.copies.arm()
        for buffer in self._late:
            have_wait(buffer, self)

    def arrived(self, source: Optional[torch.Tensor], error: Optional[BaseException]) -> None:
        """Called in the worker's thread; `source` stays until then."""
        self._error = error
        self._there.set()

    def take(self) -> None:
        """Waits for the value, if one is under way, and writes it into the buffers. Raises the
        job's failure."""
        if not self._late:
            return
        if not self._there.is_set():
            waited(self._there.wait)
        with self._taking:
            if not self._late:
                return
            if self._error is not None:
                raise self._error
            with torch._C.DisableTorchFunctionSubclass():
                self.copies.write(self._write)
            self.copies.finish()
            for buffer in self._late:
                have_back(buffer)
            self._late = []
            for copy in self._copies:
                copy.set_result(_array(self.gathered()))
            self._copies = []

    def read(self) -> None:
        self.take()

    def _write(self) -> None:
        values = self.staging / self._divisor if self._divisor > 1 else self.staging
        self.scatter(self.copies.to_device(values))


def _has_left(source: Optional[torch.Tensor], error: Optional[BaseException]) -> None:
    """Called in the worker's thread; `source` stays until then. Nobody waits for it, and a later
    round may be under way."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8)


def _array(value: torch.Tensor) -> np.ndarray:
    return _bytes(value.cpu()).numpy().view(_name(value.dtype))


def _tensor(array: np.ndarray) -> torch.Tensor:
    flat = np.ascontiguousarray(array).reshape(-1)
    return torch.from_numpy(flat.view(np.uint8).copy()).view(getattr(torch, flat.dtype.name))
