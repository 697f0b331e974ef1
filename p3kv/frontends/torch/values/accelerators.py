"""Copies between an accelerator's memory and its host's, beside what the script computes.

Each device has two streams of p3kv's: gradients leave on one, and values come on the other. Events
order these and the script's streams, so the script's thread waits for values that the network has
still to bring, and not for copies.
"""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import Any, Callable, NamedTuple, Optional, Tuple
from weakref import finalize

import torch

from p3kv.errors import NotSupportedError, in_one_line
from p3kv.frontends.torch.values.copies import Copies, Then


class _Leaving(NamedTuple):
    then: Then
    source: Optional[torch.Tensor]
    """Stays until it is copied: its memory would be given to another tensor."""
    copy: Optional[torch.Tensor]
    copied: Optional[Any]
    """The event after the copy."""


class Accelerator:
    """The streams of one device, and the thread that waits for what leaves it.

    It uses the classes of the device's own module, as `torch.cuda`: only theirs can wait for an
    event without spinning.
    """

    def __init__(self, device: torch.device, abort: Callable[[str], None]) -> None:
        """`abort(reason)` ends the job where a gradient can't leave.

        Raises AttributeError or RuntimeError for a device that torch gives no streams, or no memory
        of the host's that it can copy from and to by itself (pinned memory).
        """
        module = torch.get_device_module(device)
        self.device = device
        self.current = partial(module.current_stream, device)
        """The stream on which this thread computes."""
        self.on = module.stream
        """Has this thread compute on another stream, within `with`."""
        self._event = _event_of(module)
        self._captures = getattr(module, "is_current_stream_capturing", lambda: False)
        self._down, self.up = module.Stream(device), module.Stream(device)
        pinned((1,), torch.uint8)
        self._newest: Optional[Any] = None
        """The event after the last copy to the host."""
        self._leaving: SimpleQueue[Optional[_Leaving]] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run,
            args=(self._leaving, abort),
            name=f"p3kv copies from {device}",
            daemon=True,
        )
        finalize(self, self._leaving.put, None).atexit = False

    def start(self) -> None:
        """Has copies go on to the network."""
        self._thread.start()

    def mark(self, stream: Any) -> Any:
        """An event after what a stream has been given so far."""
        event = self._event()
        event.record(stream)
        return event

    def to_host(self, source: Optional[torch.Tensor], then: Then) -> None:
        """As `Copies.to_host`; `then` is called in a thread of its own."""
        copy = copied = None
        if source is not None:
            if self._captures():
                raise NotSupportedError(
                    "a backward pass is captured into a graph, in whose replays no gradient would "
                    "leave: capture forward passes only, or compile by torch.compile"
                )
            self._down.wait_event(self.mark(self.current()))
            with self.on(self._down):
                copy = _copied(source)
            copied = self._newest = self.mark(self._down)
        self._leaving.put(_Leaving(then, source, copy, copied))

    def step_ends(self) -> None:
        """Has what the script computes from now on come after the copies of what leaves: it may
        write into its gradients again."""
        if self._newest is not None:
            self.current().wait_event(self._newest)

    def close(self) -> None:
        """Ends the thread, when all that leaves has left."""
        self._leaving.put(None)
        self._thread.join()


def _run(leaving: SimpleQueue[Optional[_Leaving]], abort: Callable[[str], None]) -> None:
    """Until the accelerator is closed, or nobody has it any more."""
    while _pass_on(leaving.get(), abort):
        pass


def _pass_on(leaving: Optional[_Leaving], abort: Callable[[str], None]) -> bool:
    if leaving is None:
        return False
    try:
        if leaving.copied is not None:
            leaving.copied.synchronize()
        leaving.then(leaving.copy)
    except Exception as error:  # noqa: BLE001  the script's next call raises it
        abort(in_one_line(error))
    return True


class DeviceCopies(Copies):
    """Of tensors on an accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._armed: Optional[Any] = None
        self._written: Optional[Any] = None
        """Events: after what the script has computed with the old value, and after the new one is
        written."""

    def empty(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return pinned(shape, dtype)

    def to_host(self, source: Optional[torch.Tensor], then: Then) -> None:
        self._accelerator.to_host(source, then)

    def arm(self) -> None:
        self._armed = self._accelerator.mark(self._accelerator.current())

    def write(self, write: Callable[[], object]) -> None:
        accelerator = self._accelerator
        accelerator.up.wait_event(self._armed)
        with accelerator.on(accelerator.up):
            write()
        self._written = accelerator.mark(accelerator.up)

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        return value.pin_memory().to(self._accelerator.device, non_blocking=True)

    def reach_reader(self) -> bool:
        if self._written is None or self._written.query():
            return True
        self._accelerator.current().wait_event(self._written)
        return False

    def finish(self) -> bool:
        if self._written is not None:
            self._written.synchronize()
            self._written = None
        return True


def pinned(shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host's to which an accelerator copies by itself. torch keeps what is given
    back, and gives it to the next that asks for as much."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _copied(source: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, which is complete when the current stream comes to it."""
    if source.is_sparse:
        return torch.sparse_coo_tensor(
            _copied(source.indices()), _copied(source.values()), source.shape,
            is_coalesced=True, check_invariants=False,
        )  # fmt: skip
    return pinned(source.shape, source.dtype).copy_(source, non_blocking=True)


def _event_of(module: Any) -> Callable[[], Any]:
    """Makes events for which a thread sleeps, where the device has them; CUDA's other ones keep a
    processor busy."""
    try:
        module.Event(blocking=True)
    except TypeError:
        return module.Event
    return partial(module.Event, blocking=True)
