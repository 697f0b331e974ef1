"""Trials: times the steps of a script, and trains it without p3kv."""

from __future__ import annotations

import atexit
import functools
import sys
import time
from datetime import timedelta
from functools import reduce
from operator import add
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from p3kv.config import Launch
from p3kv.config.trials import ALONE, NATIVE, Trial
from p3kv.frontends.torch.environment import talk_at
from p3kv.frontends.torch.hooks import hooked
from p3kv.frontends.torch.passes import Passes
from p3kv.frontends.torch.steps import Number, evaluated, own_step
from p3kv.store.trial_clock import TrialClock

_LEFT, _ENDED = "left", "ended"
"""Keys of the rendezvous: how many workers have left, and that all have."""
_A_JOB = timedelta(days=1)


class TorchTrial(TrialClock):
    """Times steps by when the first gradient of each is ready, and ends the script after the last
    as by `sys.exit(0)`. On a GPU, events tell when gradients are computed.

    To be used from the script's thread. Make it before the hooks that send gradients.
    """

    front_end, native = "torch", "DDP"

    def __init__(
        self,
        trial: Trial,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        passes: Passes,
    ) -> None:
        super().__init__(trial)
        self._clocks = {
            device: _DeviceClock(device)
            for device in {one.device for one in parameters}
            if device.type != "cpu"
        }
        launch = Launch.from_environment()
        assert launch is not None
        self.place = launch.rank or 0, launch.num_workers
        """Rank and number of the workers, as in a job of p3kv's."""
        self._passes = passes
        self._is_between = True
        self._keys: Dict[int, int] = {}
        for at, parameter in enumerate(parameters):
            self._keys[id(parameter)] = at
            if parameter.is_floating_point() or parameter.is_complex():
                hooked(parameter, self._ready)
        if trial.store == NATIVE:
            _average_gradients(model, passes, launch)
        atexit.register(self.tell)

    def update(self, optimizer: torch.optim.Optimizer, closure: Optional[Callable[[], Any]]) -> Any:
        """A step without p3kv's servers. A worker that computes alone updates nothing, as where
        servers do."""
        if self.trial.store == NATIVE:
            return own_step(optimizer, closure)
        return evaluated(closure)

    def sum(self, number: Number) -> Number:
        """The sum of all workers' numbers; a worker that computes alone has its own."""
        if self.trial.store != NATIVE:
            return number
        numbers: List[Any] = [None] * self.place[1]
        torch.distributed.all_gather_object(numbers, number)
        total: Number = reduce(add, numbers)
        return total

    def end_step(self, wait: Callable[[], None] = lambda: None) -> None:
        """Ends a step, and the script after the last one. `wait()` waits for all weights."""
        self._is_between = True
        if self.is_over:
            wait()
            self.tell()
            sys.exit(0)

    def _ready(self, parameter: torch.Tensor) -> None:
        _, averages = self._passes.reached(parameter)
        if not averages:
            return
        clock = self._clocks.get(parameter.device)
        moment = None if clock is None else (clock, clock.now())
        if self._is_between:
            self._is_between = False
            self.begin_step()
            self.step_ready(moment)
        if self.trial.store == ALONE:
            key = self._keys[id(parameter)]
            if parameter.grad is not None and parameter.grad.is_sparse:
                self.sends_less()
            self.layer_ready(key, self.time_layer(key, parameter.nbytes), moment)

    def seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment
        clock, event = moment
        at_s: float = clock.seconds(event)
        return at_s


class _DeviceClock:
    """Tells when an accelerator has come to a place in what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._began = self.now()
        self._began.synchronize()
        self._began_s = time.monotonic()

    def now(self) -> Any:
        """An event after all that this thread has asked for on the device so far."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, event: Any) -> float:
        """Seconds of the monotonic clock at an event; waits for it."""
        event.synchronize()
        return self._began_s + float(self._began.elapsed_time(event)) / 1000


def _average_gradients(model: torch.nn.Module, passes: Passes, launch: Launch) -> None:
    """Has DistributedDataParallel, as it is by default, average gradients in each backward pass.

    The script calls its own model, so the model's hooks do what the wrapper's `forward` does.
    """
    _meet(launch)
    parallel = object.__new__(DistributedDataParallel)  # torch's own, also by p3kv.torch.ddp
    parallel.__init__(model)

    def before(module: torch.nn.Module, inputs: Any, named: Any) -> Any:
        parallel.require_backward_grad_sync = passes.syncs
        return parallel._pre_forward(*inputs, **named)

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return parallel._post_forward(output)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


def take_native_role(launch: Launch, address: str) -> None:
    """The scheduler's process is the workers' rendezvous; a worker is told by which interface the
    others reach it."""
    talk_at(address)
    if launch.role == "scheduler":
        _rendezvous(launch, True).wait([_ENDED], _A_JOB)


@functools.lru_cache(maxsize=None)
def _meet(launch: Launch) -> None:
    """Makes the process group of all workers, unless the script has one, and has the rendezvous end
    when all have left."""
    store = _rendezvous(launch, False)
    makes = not torch.distributed.is_initialized()
    if makes:
        torch.distributed.init_process_group(
            "gloo", store=store, rank=launch.rank or 0, world_size=launch.num_workers
        )

    def leave() -> None:
        if makes and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # its threads may not outlive Python
        if store.add(_LEFT, 1) == launch.num_workers:
            store.set(_ENDED, "")

    atexit.register(leave)


def _rendezvous(launch: Launch, serves: bool) -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore(
        launch.root_host, launch.root_port, is_master=serves, wait_for_workers=False
    )
