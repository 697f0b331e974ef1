"""The memory of MXNet's row_sparse arrays: the numbers of the rows that they have, and the rows.

MXNet's Python functions copy both, and wait. So they can't be used in an operation of the engine,
which must not wait. What is used here is exported by the library, but is no part of its C API.
`bind` compares what it finds with an array whose contents are known.

Read off MXNet 1.9.1: `include/mxnet/ndarray.h` (aux_shape, aux_data, CheckAndAlloc),
`include/mxnet/tuple.h` (TShape), `include/mxnet/tensor_blob.h` (TBlob).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, Tuple

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
_ALLOCATE = "_ZNK5mxnet7NDArray13CheckAndAllocERKSt6vectorINS_6TShapeESaIS2_EE"
_BLOB_BYTES = 512
"""More than a TBlob has."""


def bind() -> None:
    """To be called by the script's thread before anything else here: it waits for the engine.
    Raises NotSupportedError for a build whose arrays it can't read or write."""
    _library()
    engine.bind_writes()


def rows_of(array: NDArray) -> Tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows that a row_sparse array on the CPU has, and their elements by row.

    Views of the array's memory. Call it after an operation that reads or writes `array` has
    started, and use them until that operation is completed.
    """
    return _read(_library(), array)


def give_rows(array: NDArray, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Has a row_sparse array on the CPU have memory for `count` rows, and returns it as `rows_of`.

    It is what the array has already, where that is enough, and not initialised. Call it after an
    operation that writes `array` has started.
    """
    library = _library()
    _give(library, array, count)
    return _read(library, array)


def without_memory(shape: Tuple[int, ...], dtype: str) -> NDArray:
    """A row_sparse array on the CPU for `give_rows`."""
    handle = _new_alloc_handle("row_sparse", shape, mx.cpu(), True, np.dtype(dtype), [_NUMBER])
    return RowSparseNDArray(handle)


def elements_at(address: int, dtype: np.dtype, rows: int, row_elems: int) -> np.ndarray:
    """A view of so many rows at an address."""
    if not rows:
        return np.empty((0, row_elems), dtype)
    memory = memory_at(address, rows * row_elems * dtype.itemsize)
    return np.frombuffer(memory, dtype).reshape(rows, row_elems)


class _Shape(ctypes.Structure):
    """A TShape."""

    _fields_ = [
        ("dimensions", ctypes.c_int),
        ("more", ctypes.c_int),
        ("extents", ctypes.c_int64 * 4),
        ("others", ctypes.c_void_p),
    ]


class _Shapes(ctypes.Structure):
    """A std::vector of shapes."""

    _fields_ = [("first", ctypes.c_void_p), ("end", ctypes.c_void_p), ("room", ctypes.c_void_p)]


class _Library(NamedTuple):
    """Functions of MXNet's."""

    aux_shape: Any
    aux_data: Any
    allocate: Any


@functools.lru_cache(maxsize=None)
def _library() -> _Library:
    # They keep the GIL, like those in `engine`.
    exported = ctypes.PyDLL(_LIB._name)
    functions = [getattr(exported, name, None) for name in (_AUX_SHAPE, _AUX_DATA, _ALLOCATE)]
    if None in functions:
        raise _unusable("does not export the functions")
    library = _Library(*functions)
    library.aux_shape.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.aux_shape.restype = ctypes.c_void_p
    # A TBlob is returned in memory of the caller's, whose address comes first.
    library.aux_data.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.aux_data.restype = ctypes.c_void_p
    library.allocate.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.allocate.restype = None
    _check(library)
    return library


def _read(library: _Library, array: NDArray) -> Tuple[np.ndarray, np.ndarray]:
    handle, row_elems = array.handle.value, int(np.prod(array.shape[1:], dtype=np.int64))
    count = _Shape.from_address(library.aux_shape(handle, 0)).extents[0]
    if not count:
        return np.empty(0, _NUMBER), np.empty((0, row_elems), array.dtype)
    blob = ctypes.create_string_buffer(_BLOB_BYTES)
    library.aux_data(ctypes.addressof(blob), handle, 0)
    numbers_at = ctypes.c_void_p.from_buffer(blob).value or 0
    numbers = np.frombuffer(memory_at(numbers_at, count * _NUMBER.itemsize), _NUMBER)
    dtype = np.dtype(array.dtype)
    return numbers, elements_at(engine.address(array), dtype, count, row_elems)


def _give(library: _Library, array: NDArray, count: int) -> None:
    shape = _Shape(1, 0, (count,))
    end = ctypes.addressof(shape) + ctypes.sizeof(shape)
    shapes = _Shapes(ctypes.addressof(shape), end, end)
    library.allocate(array.handle.value, ctypes.addressof(shapes))


def _check(library: _Library) -> None:
    known = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = mx.nd.sparse.row_sparse_array((known, [1, 4]), (5, 3))
    array.wait_to_read()
    numbers, elements = _read(library, array)
    if numbers.tolist() == [1, 4] and np.array_equal(elements, known):
        given = without_memory((5, 3), "float32")
        _give(library, given, 2)
        its_numbers, its_elements = _read(library, given)
        if len(its_numbers) == 2:
            its_numbers[:], its_elements[:] = numbers, elements
            if np.array_equal(given.asnumpy(), array.asnumpy()):
                return
    raise _unusable("has another layout of arrays than 1.9.1")


def _unusable(why: str) -> NotSupportedError:
    return NotSupportedError(
        f"this build of MXNet {why} with which p3kv reads and writes row_sparse arrays; use dense "
        "gradients, or a build of MXNet 1.9.1 that p3kv names in its extras, such as 'p3kv[cpu]'"
    )
