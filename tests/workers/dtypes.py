"""Keys of every dtype, casts, and half precision on the servers: compared bit for bit.

Two workers: then no order of a sum differs from another.
"""

from typing import Any, Dict, Tuple

import mxnet as mx
import numpy as np
import pytest
from checks import equal
from mxnet.kvstore import KVStoreBase

from p3kv.errors import NotSupportedError

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
SHAPES = [(1,), (3, 5), (1001,)]
DEVICES = [mx.cpu(0), mx.cpu(1)]
STEPS = 4
HALF: Dict[str, Dict[str, Any]] = {
    "sgd": {},
    "sgd momentum": {"momentum": 0.9},
    "nag momentum": {"momentum": 0.9},
    "signum": {"momentum": 0.9},
    "adam": {},
    "adagrad": {},
    "rmsprop": {"gamma1": 0.8},
    "ftrl": {},
}
NOT_IN_HALF = ("adagrad", "rmsprop", "ftrl")
"""MXNet itself runs these for float16 only with multi_precision."""


def numbers(dtype: str, shape: tuple, *seeds: int) -> np.ndarray:
    """Any numbers of the dtype; sums of integers wrap around."""
    generator = np.random.RandomState([*seeds, 1])
    if dtype.startswith("float"):
        return generator.standard_normal(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.randint(limits.min, limits.max, shape, dtype=dtype)


def filled(value: np.ndarray, device: mx.Context = DEVICES[0]) -> mx.nd.NDArray:
    return mx.nd.array(value, ctx=device, dtype=value.dtype)


def zeros(dtype: str, shape: tuple, device: mx.Context = DEVICES[0]) -> mx.nd.NDArray:
    return mx.nd.zeros(shape, ctx=device, dtype=dtype)


def every_dtype_is_kept_and_summed_in_itself(store: KVStoreBase) -> None:
    for dtype in DTYPES:
        for n, shape in enumerate(SHAPES):
            key, begin = f"{dtype} {n}", numbers(dtype, shape, 9)
            out = zeros(dtype, shape)
            store.init(key, filled(numbers(dtype, shape, 9 + store.rank)))
            store.pull(key, out=out)
            equal(out, begin)
            parts = [numbers(dtype, shape, rank) for rank in range(2)]
            value = filled(parts[store.rank])
            store.push(key, value)
            store.pull(key, out=out)
            equal(out, parts[0] + parts[1])
            store.pushpull(key, value)
            equal(value, parts[0] + parts[1])
            store.broadcast(f"broadcast {key}", filled(numbers(dtype, shape, store.rank)), out)
            equal(out, parts[0])


def every_dtype_is_summed_over_devices(store: KVStoreBase) -> None:
    for dtype in DTYPES:
        key, shape = f"devices {dtype}", SHAPES[1]
        store.init(key, zeros(dtype, shape))
        parts = [[numbers(dtype, shape, rank, d) for d in range(2)] for rank in range(2)]
        values = [filled(parts[store.rank][d], DEVICES[d]) for d in range(2)]
        outs = [zeros(dtype, shape, device) for device in DEVICES]
        store.pushpull(key, values, out=outs)
        total = (parts[0][0] + parts[0][1]) + (parts[1][0] + parts[1][1])
        for out, device in zip(outs, DEVICES):
            assert out.context == device
            equal(out, total)


def tensors_without_elements_or_axes_have_every_dtype(store: KVStoreBase) -> None:
    with mx.util.np_shape(True):
        for dtype in DTYPES:
            for n, shape in enumerate([(), (0, 3)]):
                key = f"few {dtype} {n}"
                out = zeros(dtype, shape)
                store.broadcast(key, mx.np.ones(shape, dtype), out)
                equal(out, np.ones(shape, dtype))
                outs = [mx.np.zeros(shape, dtype, ctx=device) for device in DEVICES]
                store.pushpull(key, [mx.np.ones(shape, dtype, ctx=d) for d in DEVICES], out=outs)
                wide = zeros("float64", shape)
                store.pull(key, out=wide)
                for one in outs:
                    equal(one, np.full(shape, 4, dtype))
                equal(wide, np.full(shape, 4, "float64"))


def a_value_is_cast_into_an_array_of_another_dtype(store: KVStoreBase) -> None:
    whole = np.arange(105, dtype="float32").reshape(35, 3)
    for dtype in DTYPES:
        for other in DTYPES:
            key, cast = f"{dtype} to {other}", whole.astype(other)
            out = zeros(other, whole.shape)
            store.broadcast(key, filled(whole.astype(dtype)), out)
            equal(out, cast)
            out[:] = 0
            store.pull(key, out=out)
            equal(out, cast)
            half = filled((whole * store.rank).astype(dtype))
            outs = [zeros(other, whole.shape, DEVICES[1]), zeros(dtype, whole.shape)]
            for wishes in (outs, outs[:1]):
                for one in wishes:
                    one[:] = 0
                store.pushpull(key, half, out=wishes)
                for one in wishes:
                    equal(one, cast.astype(one.dtype))


def a_cast_that_loses_digits_loses_mxnet_s(store: KVStoreBase) -> None:
    value = filled(np.array([1.5, -2.75, 300, 1 / 3], "float64"))
    store.init("digits", value)
    for dtype in DTYPES:
        out, wish = zeros(dtype, (4,)), zeros(dtype, (4,))
        store.pull("digits", out=out)
        value.copyto(wish)
        equal(out, wish.asnumpy())


def a_pull_leaves_sparse_arrays_as_they_are(store: KVStoreBase) -> None:
    store.init("dense", mx.nd.ones((4, 2)))
    store.init("dense too", mx.nd.ones((4, 2)))
    for stype in ("row_sparse", "csr"):
        sparse, out = zeros("float32", (4, 2)).tostype(stype), zeros("float32", (4, 2))
        store.pull("dense", out=sparse)
        store.pull("dense", out=[sparse, out])
        equal(out, np.ones((4, 2), np.float32))
        out[:] = 0
        store.pull(["dense", "dense too"], out=[sparse, out])
        equal(out, np.ones((4, 2), np.float32))
        equal(sparse, np.zeros((4, 2), np.float32))
        with pytest.raises(NotSupportedError, match="sparse"):
            store.pull("dense", out=sparse, ignore_sparse=False)


def _made(name: str, **more: Any) -> mx.optimizer.Optimizer:
    settings = {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 0.5, **HALF[name], **more}
    return mx.optimizer.create(name.split()[0], **settings)


def _half_is_updated(store: KVStoreBase, multi_precision: bool) -> None:
    for number, name in enumerate(HALF):
        if name in NOT_IN_HALF and not multi_precision:
            continue
        store.set_optimizer(_made(name, multi_precision=multi_precision))
        updater = mx.optimizer.get_updater(_made(name, multi_precision=multi_precision))
        pairs: Dict[int, Tuple[mx.nd.NDArray, mx.nd.NDArray]] = {}
        for n, shape in enumerate(SHAPES):
            key = 1000 + 100 * number + 10 * n + multi_precision
            pairs[key] = filled(numbers("float16", shape, key)), zeros("float16", shape)
            store.broadcast(key, pairs[key][0], pairs[key][1])
        for step in range(STEPS):
            for key, (alone, weight) in pairs.items():
                # Eighths: their sum is exact in float16.
                parts = [
                    np.random.RandomState([key, step, rank]).randint(-40, 40, alone.shape) / 8
                    for rank in range(2)
                ]
                gradient = filled(parts[store.rank].astype("float16"))
                store.pushpull(key, gradient, out=weight)
                updater(key, filled((parts[0] + parts[1]).astype("float16")), alone)
                equal(weight, alone.asnumpy())


def half_precision_is_updated_as_by_one_process(store: KVStoreBase) -> None:
    _half_is_updated(store, False)


def multi_precision_is_updated_as_by_one_process(store: KVStoreBase) -> None:
    _half_is_updated(store, True)


WIDE: Dict[str, Dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "adam": {},
    "nadam": {},
    "lars": {"momentum": 0.9},
    "lamb": {},
    "lbsgd": {"momentum": 0.9},
}


def multi_precision_sums_in_float32(store: KVStoreBase) -> None:
    """As on MXNet's own servers: a float32 copy of the weight is updated by a float32 sum."""
    for name, settings in WIDE.items():
        for codec in ("identity", "float16"):
            one = mx.kv.create("p3")
            one.set_gradient_compression({"type": codec})
            settings = {"learning_rate": 0.1, "rescale_grad": 1e-3, **settings}
            one.set_optimizer(mx.optimizer.create(name, multi_precision=True, **settings))
            updater = mx.optimizer.get_updater(mx.optimizer.create(name, **settings))
            begin = numbers("float16", SHAPES[2], 5)
            copy, weight = filled(begin.astype("float32")), zeros("float16", SHAPES[2])
            one.broadcast("w", filled(begin), weight)
            for step in range(STEPS):
                parts = [numbers("float16", SHAPES[2], step, rank) for rank in range(2)]
                for part in parts:
                    part[0] = 60_000  # twice as much is infinite in float16
                one.pushpull("w", filled(parts[store.rank]), out=weight)
                updater("w", filled(parts[0].astype("float32") + parts[1]), copy)
                equal(weight, copy.asnumpy().astype("float16"))
                assert np.isfinite(copy.asnumpy()).all()


def an_optimizer_updates_no_integers(store: KVStoreBase) -> None:
    out = zeros("int64", (3,))
    store.broadcast("count", filled(np.array([1, 2, 3])), out)
    equal(out, np.array([1, 2, 3]))
    with pytest.raises(NotSupportedError, match="'count' of int64 is pushed to a store with an"):
        store.pushpull("count", out)
    store.pull("count", out=out)
    equal(out, np.array([1, 2, 3]))


CHECKS = [
    every_dtype_is_kept_and_summed_in_itself,
    every_dtype_is_summed_over_devices,
    tensors_without_elements_or_axes_have_every_dtype,
    a_value_is_cast_into_an_array_of_another_dtype,
    a_cast_that_loses_digits_loses_mxnet_s,
    a_pull_leaves_sparse_arrays_as_they_are,
    # From here on the servers have an optimizer.
    half_precision_is_updated_as_by_one_process,
    multi_precision_is_updated_as_by_one_process,
    multi_precision_sums_in_float32,
    an_optimizer_updates_no_integers,
]
