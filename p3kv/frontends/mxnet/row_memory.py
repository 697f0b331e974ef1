"""The memory of MXNet's row_sparse arrays: the numbers of the rows that they have, and the rows.

MXNet's Python functions copy both, and wait. So they can't be used in an operation of the engine,
which must not wait. What is used here is exported by the library, but is no part of its C API.
`bind` compares what it finds with an array whose contents are known.

Read off MXNet 1.9.1: `include/mxnet/ndarray.h` (aux_shape, aux_data), `include/mxnet/tuple.h`
(TShape), `include/mxnet/tensor_blob.h` (TBlob).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray, _new_alloc_handle

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import engine
from p3kv.worker.transfers import memory_at

_NUMBER = np.dtype(np.int64)
_AUX_SHAPE = "_ZNK5mxnet7NDArray9aux_shapeEm"
_AUX_DATA = "_ZNK5mxnet7NDArray8aux_dataEm"
_BLOB_BYTES = 512
"""More than a TBlob has."""
_EXTENTS_AT = 8
"""In a TShape of few dimensions: its extents come after two ints."""


def bind() -> None:
    """To be called by the script's thread before the first `rows_of`: it waits for the engine.

    Raises NotSupportedError for a build whose arrays it can't read.
    """
    _bound()
    engine.bind_writes()


def rows_of(array: NDArray) -> Tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows that a row_sparse array on the CPU has, and their elements by row.

    Views of the array's memory. Call it after an operation that reads or writes `array` has
    started, and use them until that operation is completed.
    """
    return _bound()(array)


def with_rows(shape: Tuple[int, ...], dtype: str, count: int) -> NDArray:
    """A row_sparse array on the CPU that has memory for `count` rows, not initialised."""
    handle = _new_alloc_handle(
        "row_sparse", shape, mx.cpu(), False, np.dtype(dtype), [_NUMBER], [(count,)]
    )
    return RowSparseNDArray(handle)


def elements_at(address: int, dtype: np.dtype, rows: int, row_elems: int) -> np.ndarray:
    """A view of so many rows at an address."""
    if not rows:
        return np.empty((0, row_elems), dtype)
    memory = memory_at(address, rows * row_elems * dtype.itemsize)
    return np.frombuffer(memory, dtype).reshape(rows, row_elems)


@functools.lru_cache(maxsize=None)
def _bound() -> Callable[[NDArray], Tuple[np.ndarray, np.ndarray]]:
    # They keep the GIL, like those in `engine`.
    library = ctypes.PyDLL(_LIB._name)
    aux_shape: Any = getattr(library, _AUX_SHAPE, None)
    aux_data: Any = getattr(library, _AUX_DATA, None)
    if aux_shape is None or aux_data is None:
        raise _unusable("does not export the functions")
    aux_shape.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    aux_shape.restype = ctypes.c_void_p
    # A TBlob is returned in memory of the caller's, whose address comes first.
    aux_data.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    aux_data.restype = ctypes.c_void_p

    def read(array: NDArray) -> Tuple[np.ndarray, np.ndarray]:
        handle = array.handle.value
        count = ctypes.c_int64.from_address(aux_shape(handle, 0) + _EXTENTS_AT).value
        row_elems = int(np.prod(array.shape[1:], dtype=np.int64))
        if not count:
            return np.empty(0, _NUMBER), np.empty((0, row_elems), array.dtype)
        blob = ctypes.create_string_buffer(_BLOB_BYTES)
        aux_data(ctypes.addressof(blob), handle, 0)
        numbers_at = ctypes.c_void_p.from_buffer(blob).value or 0
        numbers = np.frombuffer(memory_at(numbers_at, count * _NUMBER.itemsize), _NUMBER)
        dtype = np.dtype(array.dtype)
        return numbers, elements_at(engine.address(array), dtype, count, row_elems)

    _check(read)
    return read


def _check(read: Callable[[NDArray], Tuple[np.ndarray, np.ndarray]]) -> None:
    known = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = mx.nd.sparse.row_sparse_array((known, [1, 4]), (5, 3))
    array.wait_to_read()
    numbers, elements = read(array)
    if numbers.tolist() != [1, 4] or not np.array_equal(elements, known):
        raise _unusable("has another layout of arrays than 1.9.1")


def _unusable(why: str) -> NotSupportedError:
    return NotSupportedError(
        f"this build of MXNet {why} with which p3kv reads row_sparse arrays; use dense gradients, "
        "or a build of MXNet 1.9.1 that p3kv names in its extras, such as 'p3kv[cpu]'"
    )
