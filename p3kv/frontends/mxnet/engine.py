"""Operations of our own in MXNet's dependency engine.

An operation names the arrays that it reads and the arrays that it writes. The engine starts it
when they are ready, and holds back what depends on it until some thread completes it, at any later
time. So a gradient leaves when it is ready, and a layer starts when its own weights have arrived,
without a thread that waits.

Read off MXNet 1.9.1: `include/mxnet/c_api.h` (MXEnginePushAsyncND), `include/mxnet/engine.h`
(CallbackOnComplete, Var), `src/engine/threaded_engine.cc` (OnCompleteStatic).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import signal
import struct
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, BinaryIO, Callable, Dict, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import runtime
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from p3kv.errors import NotSupportedError

_log = logging.getLogger(__name__)


_ON_COMPLETE = struct.Struct("PPP")
"""CallbackOnComplete: a function, the engine, and what the engine knows the operation by."""


class _Context(ctypes.Structure):
    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int)]


_AsyncFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CompleteFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CPU = ctypes.byref(_Context(1, 0))
_ASYNC = ctypes.byref(ctypes.c_int(4))
"""FnProperty::kAsync: the operation returns at once, so the engine wakes no thread to call it."""

_Arrays = Tuple[Sequence[NDArray], Sequence[NDArray]]


class Operation:
    """One operation that the engine has started and that waits for `complete`. Any thread may
    complete it, exactly once. Its arrays are kept until then."""

    __slots__ = ("_arrays", "_on_complete")

    def __init__(self, on_complete: bytes, arrays: _Arrays) -> None:
        """`on_complete`: what the engine gave, as bytes, because it is in memory of the engine's.
        They are read when the operation is completed, after the script has gone on."""
        self._arrays = arrays
        self._on_complete = on_complete

    def complete(self, error: Optional[BaseException] = None) -> None:
        """Lets everything that depends on the written arrays go on.

        With `error`, a caller that waits for one of the arrays gets an `mxnet.base.MXNetError`
        with its message instead of a value.
        """
        handle = None if error is None else _native_error(str(error))
        callback, engine, param = _ON_COMPLETE.unpack(self._on_complete)
        _completing(callback)(engine, param, None if handle is None else ctypes.addressof(handle))


# An engine has one completion function for all operations.
_completing = functools.lru_cache(maxsize=None)(_CompleteFunction)

# The engine calls one C function for every operation; the parameter says which operation it is.
_starts: Dict[int, Tuple[Callable[[Operation], None], _Arrays]] = {}
_tickets = itertools.count(1)


_thread = threading.local()


def _keep_thread_state() -> None:
    """Has Python keep what it knows of this thread. Else it would make that anew for each operation
    that a thread of the engine starts, and map and unmap memory for it."""
    if not hasattr(_thread, "is_kept"):
        _thread.is_kept = True
        ctypes.pythonapi.PyGILState_Ensure()


@_AsyncFunction
def _start(_run_context: int, on_complete: int, ticket: int) -> None:
    _keep_thread_state()
    start, arrays = _starts.pop(ticket)
    operation = Operation(ctypes.string_at(on_complete, _ON_COMPLETE.size), arrays)
    try:
        start(operation)
    except BaseException as error:  # noqa: BLE001  a C caller: nobody above could catch it
        _log.exception("an engine operation of p3kv failed to start")
        operation.complete(error)


def push(
    start: Callable[[Operation], None],
    reads: Sequence[NDArray],
    writes: Sequence[NDArray],
    name: bytes = b"p3kv",
) -> None:
    """Has the engine call `start(operation)` when all of `reads` and `writes` are ready.

    Returns at once. `start` runs in a thread of the engine, or in this thread before `push` returns
    if all arrays are ready. It must not block. It, or the thread to which it gives the operation,
    completes the operation later. An array may be in only one of the lists.
    """
    ticket = next(_tickets)
    _starts[ticket] = (start, (reads, writes))
    _thread.is_pushing = True
    failed = _LIB.MXEnginePushAsyncND(
        _start,
        ctypes.c_void_p(ticket),
        None,
        _CPU,
        _handles(reads),
        len(reads),
        _handles(writes),
        len(writes),
        _ASYNC,
        0,
        name,
        False,
    )
    _thread.is_pushing = False
    if hasattr(_thread, "is_interrupted"):
        del _thread.is_interrupted
        raise KeyboardInterrupt
    check_call(failed)


def hold_back_interrupts() -> None:
    """Raise KeyboardInterrupt by Ctrl-C where it isn't lost. In what the engine calls nobody could
    catch it, and the operation would never be completed, so it waits until `push` is over. Python
    prints and drops what is raised in `__del__`, which each array of MXNet has, so there it comes a
    moment later. Leaves a script's own handler alone."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(signum: int, frame: Optional[FrameType]) -> None:
    if getattr(_thread, "is_pushing", False):
        _thread.is_interrupted = True
    elif _is_in_del(frame):
        main = threading.main_thread().ident
        threading.Timer(_AFTER_DEL_S, signal.pthread_kill, (main, signum)).start()
    else:
        signal.default_int_handler(signum, frame)


_AFTER_DEL_S = 0.01
"""How long an interrupt waits for `__del__` to end."""


def _is_in_del(frame: Optional[FrameType]) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _handles(arrays: Sequence[NDArray]) -> Any:
    if len(arrays) == 1:  # nearly always: there is no array to build
        return ctypes.byref(arrays[0].handle)
    return (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])


def address(array: NDArray) -> int:
    """Where a CPU array's elements are in memory.

    Call it after an operation that reads or writes `array` has started, and use the result until
    that operation is completed: the engine may move the memory between operations.

    oneDNN keeps weights that inference has used in a blocked layout. It restores the layout in an
    operation of its own, which may come after ours, so this function restores the layout first.
    """
    handle = array.handle.value
    _reorder_to_default(handle)
    pointer = ctypes.c_void_p()  # not one for all: threads may take turns after any call
    failed = _get_data(handle, ctypes.byref(pointer))
    if failed:
        check_call(failed)
    return pointer.value or 0


# These calls are short and keep the GIL. Otherwise the worker's thread would take it at each of
# them, and the script would wait.
_keeping_gil = ctypes.PyDLL(_LIB._name)
_get_data = _keeping_gil.MXNDArrayGetData
_get_data.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_REORDER = "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv"
_ONEDNN = ("MKLDNN", "ONEDNN")
"""MXNet's names of the feature, in 1.9.1 and later."""


def _bind_reorder(library: Any = _keeping_gil) -> Callable[[int], None]:
    """Returns a function that restores the default layout of an array, given its handle. It does
    nothing in a build without oneDNN, which never changes layouts. Raises NotSupportedError for a
    build that changes layouts and does not export the function that restores them."""
    function = getattr(library, _REORDER, None)
    if function is None:
        features = runtime.Features()
        if any(name in features and features.is_enabled(name) for name in _ONEDNN):
            raise NotSupportedError(
                "this build of MXNet has oneDNN, but not the function with which p3kv gets "
                f"weights out of oneDNN's layouts ({_REORDER}); they would be sent in the wrong "
                "order. Install a build of MXNet 1.9.1 that p3kv names in its extras, such as "
                "'p3kv[cpu]'."
            )
        return lambda handle: None
    function.argtypes = [ctypes.c_void_p]
    function.restype = None

    pointer_at = ctypes.c_void_p.from_address

    def reorder(handle: int) -> None:
        # The chunk is what the first member of an NDArray, a shared pointer, points to.
        function(pointer_at(handle).value)

    return reorder


_reorder_to_default = _bind_reorder()


def bind_writes() -> None:
    """To be called by the script's thread before the first `writes`: it waits for the engine."""
    _place_of_variable()


def writes(array: NDArray) -> Optional[int]:
    """How often operations have written an array's memory, also through its views; None in a build
    where that can't be known.

    Call it after an operation that reads or writes `array` has started. An operation that writes
    counts when it is completed.
    """
    place = _place_of_variable()
    return None if place is None else _writes(array, place)


def _writes(array: NDArray, place: int) -> int:
    chunk = _word(array.handle.value)
    return _word(_word(chunk + place) + _WORD_BYTES)


@functools.lru_cache(maxsize=None)
def _place_of_variable() -> Optional[int]:
    """Where in a chunk, which all views of an array share, its variable in the engine is.

    The chunk's layout depends on the build, so it is looked for: the variable is what begins with
    the table of one of the engine's two classes. `Var` (`include/mxnet/engine.h`) has the count of
    writes behind that. An array that is written once more shows whether it counts so.
    """
    tables = []
    for name in ("_ZTVN5mxnet6engine11ThreadedVarE", "_ZTVN5mxnet6engine8NaiveVarE"):
        with suppress(ValueError):
            # Objects begin with the address of the table's third word.
            tables.append(
                ctypes.addressof(ctypes.c_char.in_dll(_keeping_gil, name)) + 2 * _WORD_BYTES
            )
    known = mx.nd.zeros((1,))
    known.wait_to_read()
    chunk = _word(known.handle.value)
    try:
        # What is no address must not be read as one, nor what is behind a chunk that is small.
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            places = range(0, _CHUNK_BYTES, _WORD_BYTES)
            found = [p for p in places if _read(memory, _read(memory, chunk + p)) in tables]
    except OSError:
        return None
    if len(found) != 1:
        return None
    before = _writes(known, found[0])
    known[:] = 1
    known.wait_to_read()
    return found[0] if _writes(known, found[0]) == before + 1 else None


def _read(memory: BinaryIO, address: int) -> int:
    """The word at an address; 0 where there is no memory."""
    try:
        memory.seek(address)
        return int.from_bytes(memory.read(_WORD_BYTES), sys.byteorder)
    except (OSError, OverflowError, ValueError):
        return 0


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
_CHUNK_BYTES = 256
_RUNTIME_ERROR_BYTES = 64


def _native_error(message: str) -> ctypes.Array:
    """A `dmlc::Error`, which adds nothing to `std::runtime_error`, in memory of our own."""
    libstdcpp = ctypes.CDLL("libstdc++.so.6")
    construct = libstdcpp["_ZNSt13runtime_errorC1EPKc"]
    construct.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    construct.restype = None
    error = ctypes.create_string_buffer(_RUNTIME_ERROR_BYTES)
    construct(ctypes.addressof(error), message.encode())
    return error


def complete_before_forks() -> None:
    """Has every fork of this process wait until all of MXNet's operations are complete: those of
    process pools, data loaders, `os.system`.

    Before a fork MXNet stops its engine, which waits for all operations. Python threads complete
    our operations, and the forking thread may hold the GIL meanwhile: a deadlock. So handlers of
    ours complete all operations before MXNet's handler runs, while the GIL is free for other
    threads. Read off MXNet 1.9.1: `src/initialize.cc` (install_pthread_atfork_handlers),
    `src/engine/threaded_engine_perdevice.cc` (Stop).

    Python calls the first handler before it takes locks of its own, but not for every fork:
    `subprocess` on Python 3.8 and 3.9 and libraries in C fork without it. The C library calls the
    second handler before every fork. It calls the handlers that were registered last first, so ours
    runs before MXNet's.
    """
    os.register_at_fork(before=_wait)
    register = ctypes.CDLL(None)["__register_atfork"]
    register.argtypes = [ctypes.c_void_p] * 4
    register(ctypes.cast(_wait_in_c, ctypes.c_void_p), None, None, None)


def _wait() -> None:
    with suppress(mx.base.MXNetError):  # a caller that waits for one of these arrays gets it, too
        mx.nd.waitall()


_wait_in_c = ctypes.CFUNCTYPE(None)(_wait)
"""Kept for the life of the process, because the C library has its address."""
