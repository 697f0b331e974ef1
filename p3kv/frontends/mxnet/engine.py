"""Operations of our own in MXNet's dependency engine.

An operation names the arrays that it reads and the arrays that it writes. The engine starts it
when they are ready, and holds back what depends on it until some thread completes it, at any later
time. So a gradient leaves when it is ready, and a layer starts when its own weights have arrived,
without a thread that waits.

Read off MXNet 1.9.1: `include/mxnet/c_api.h` (MXEnginePushAsyncND), `include/mxnet/engine.h`
(CallbackOnComplete), `src/engine/threaded_engine.cc` (OnCompleteStatic).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from mxnet import runtime
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from p3kv.errors import NotSupportedError

_log = logging.getLogger(__name__)


class _OnComplete(ctypes.Structure):
    _fields_ = [
        ("callback", ctypes.c_void_p),
        ("engine", ctypes.c_void_p),
        ("param", ctypes.c_void_p),
    ]


class _Context(ctypes.Structure):
    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int)]


_AsyncFunction = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(_OnComplete), ctypes.c_void_p
)
_CompleteFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CPU = ctypes.byref(_Context(1, 0))
_ASYNC = ctypes.byref(ctypes.c_int(4))
"""FnProperty::kAsync: the operation returns at once, so the engine wakes no thread to call it."""

_Arrays = Tuple[Sequence[NDArray], Sequence[NDArray]]


class Operation:
    """One operation that the engine has started and that waits for `complete`.

    Any thread may complete it, exactly once. Its arrays are kept until then.
    """

    __slots__ = ("_arrays", "_callback", "_engine", "_param")

    def __init__(self, on_complete: _OnComplete, arrays: _Arrays) -> None:
        self._arrays = arrays
        self._callback = on_complete.callback
        self._engine = on_complete.engine
        self._param = on_complete.param

    def complete(self, error: Optional[BaseException] = None) -> None:
        """Lets everything that depends on the written arrays go on.

        With `error`, a caller that waits for one of the arrays gets an `mxnet.base.MXNetError`
        with its message instead of a value.
        """
        handle = None if error is None else _native_error(str(error))
        _completing(self._callback)(
            self._engine, self._param, None if handle is None else ctypes.addressof(handle)
        )


# An engine has one completion function for all operations.
_completing = functools.lru_cache(maxsize=None)(_CompleteFunction)

# The engine calls one C function for every operation; the parameter says which operation it is.
_starts: Dict[int, Tuple[Callable[[Operation], None], _Arrays]] = {}
_tickets = itertools.count(1)


@_AsyncFunction
def _start(_run_context: int, on_complete: ctypes._Pointer, ticket: int) -> None:
    start, arrays = _starts.pop(ticket)
    operation = Operation(on_complete.contents, arrays)
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
    check_call(
        _LIB.MXEnginePushAsyncND(
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
    )


def _handles(arrays: Sequence[NDArray]) -> Any:
    if len(arrays) == 1:  # nearly always: there is no array to build
        return ctypes.byref(arrays[0].handle)
    return (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])


def memory(array: NDArray, size_bytes: int) -> memoryview:
    """The memory of a CPU array of `size_bytes` bytes; asking MXNet for the size is slower.

    Call it after an operation that reads or writes `array` has started, and use the result until
    that operation is completed: the engine may move the memory between operations.

    oneDNN keeps weights that inference has used in a blocked layout. It restores the layout in an
    operation of its own, which may come after ours, so this function restores the layout first.
    """
    _reorder_to_default(array)
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return _memoryview(pointer, size_bytes, _WRITABLE) if size_bytes else memoryview(b"")


_memoryview = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memoryview.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


_REORDER = "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv"
_ONEDNN = ("MKLDNN", "ONEDNN")
"""MXNet's names of the feature, in 1.9.1 and later."""


def _bind_reorder(library: Any = _LIB) -> Callable[[NDArray], None]:
    """Returns a function that restores an array's default layout. It does nothing in a build
    without oneDNN, which never changes layouts. Raises NotSupportedError for a build that changes
    layouts and does not export the function that restores them."""
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
        return lambda array: None
    function.argtypes = [ctypes.c_void_p]
    function.restype = None

    def reorder(array: NDArray) -> None:
        # The chunk is what the first member of an NDArray, a shared pointer, points to.
        function(ctypes.cast(array.handle, ctypes.POINTER(ctypes.c_void_p))[0])

    return reorder


_reorder_to_default = _bind_reorder()
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
