"""MXNet's KVStore as its own tests/nightly/dist_sync_kvstore.py uses it, the dense parts.

Argument: the folder for the names of the checks that pass. Two workers: then no order of a sum
differs from another, and all comparisons are bit for bit.
"""

import p3kv  # noqa: F401, I001
import os
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from checks import equal, random, read, run
from mxnet.kvstore import KVStoreBase

from p3kv.errors import KeyMismatchError, NotSupportedError

WORKERS = 2
SMALL = (2, 3)
BIG = (1200, 1200)
RATE = 2
DEVICES = [mx.cpu(0), mx.cpu(1)]
SHAPES = [(1,), (1, 1, 1), (7,), (2, 3), (13, 17, 5), (999,), (1000,), (1001,), (3001,)]


def total(shape: tuple, *seeds: int, dtype: str = "float32") -> np.ndarray:
    return random(shape, 0, *seeds, dtype=dtype) + random(shape, 1, *seeds, dtype=dtype)


def mine(store: KVStoreBase, shape: tuple, *seeds: int, dtype: str = "float32") -> mx.nd.NDArray:
    return mx.nd.array(random(shape, store.rank, *seeds, dtype=dtype), dtype=dtype)


def it_says_who_it_is(store: KVStoreBase) -> None:
    assert store.type == "dist_sync_p3"
    assert "dist" in store.type
    assert "_sync" in store.type
    assert store.num_workers == WORKERS
    assert store.rank in range(WORKERS)
    assert (store.local_rank, store.local_size) == (store.rank, WORKERS)
    assert os.environ["LOCAL_RANK"] == str(store.local_rank)
    assert store.is_capable("optimizer")
    assert store.is_capable(KVStoreBase.OPTIMIZER)
    assert isinstance(store, KVStoreBase)


def init_gives_rank_0_s_values_to_all(store: KVStoreBase) -> None:
    for number in range(100):
        key = f"init{number}"
        store.init(key, [mx.nd.full(SMALL, number + 1000 * store.rank)])
        value = mx.nd.zeros(SMALL)
        store.pull(key, out=value)
        equal(value, np.full(SMALL, number, np.float32))
    for number in range(3):
        store.init(number, mx.nd.full(BIG, number + 1000 * store.rank))
        value = mx.nd.zeros(BIG)
        store.pull(number, out=value)
        equal(value, np.full(BIG, number, np.float32))


def a_list_of_keys_is_initialised_and_pulled_at_once(store: KVStoreBase) -> None:
    keys = ["3", "5", "7"]
    store.init(keys, [mine(store, SMALL, n) for n in range(3)])
    values = [mx.nd.zeros(SMALL) for _ in keys]
    store.pull(keys, out=values)
    for n, value in enumerate(values):
        equal(value, random(SMALL, 0, n))


def numbers_and_texts_are_different_keys(store: KVStoreBase) -> None:
    store.init(50, mx.nd.ones(SMALL))
    store.init("50", mx.nd.ones(BIG))
    value = mx.nd.zeros(SMALL)
    store.pull(50, out=value)
    equal(value, np.ones(SMALL, np.float32))


def broadcast_gives_rank_0_s_value_to_all_devices(store: KVStoreBase) -> None:
    outs = [mx.nd.zeros(SMALL, ctx=device) for device in DEVICES]
    store.broadcast("broadcast", mine(store, SMALL), outs)
    for out, device in zip(outs, DEVICES):
        assert out.context == device
        equal(out, random(SMALL, 0))
    # As gluon's Trainer calls it: the value is one of the arrays that get it.
    values = [mine(store, BIG), mx.nd.zeros(BIG, ctx=mx.cpu(1))]
    store.broadcast(51, values[0], values)
    for value in values:
        equal(value, random(BIG, 0))


def broadcast_takes_lists_of_keys(store: KVStoreBase) -> None:
    keys = ["lists a", "lists b"]
    values = [mine(store, SMALL, n) for n in range(2)]
    outs = [[mx.nd.zeros(SMALL, ctx=device) for device in DEVICES] for _ in keys]
    store.broadcast(keys, values, outs)
    for n in range(2):
        for out in outs[n]:
            equal(out, random(SMALL, 0, n))


def every_shape_is_summed_whole(store: KVStoreBase) -> None:
    for n, shape in enumerate([*SHAPES, BIG]):
        store.init(f"shape{n}", mx.nd.zeros(shape))
        value = mine(store, shape, n)
        out = mx.nd.zeros(shape)
        store.pushpull(f"shape{n}", value, out=out)
        equal(out, total(shape, n))
        equal(value, random(shape, store.rank, n))


def without_out_the_sum_takes_the_place_of_the_gradient(store: KVStoreBase) -> None:
    store.init("in place", mx.nd.zeros(BIG))
    value = mine(store, BIG)
    store.pushpull("in place", value)
    equal(value, total(BIG))


def float64_keeps_its_digits(store: KVStoreBase) -> None:
    store.init("float64", mx.nd.zeros((41, 57), dtype="float64"))
    value = mine(store, (41, 57), dtype="float64")
    store.pushpull("float64", value)
    equal(value, total((41, 57), dtype="float64"))


def arrays_without_elements_and_without_axes_are_keys_too(store: KVStoreBase) -> None:
    with mx.util.np_shape(True):
        for n, shape in enumerate([(0,), (0, 3), (4, 0), ()]):
            key = f"no axes {n}"
            out = [mx.nd.ones(shape, ctx=device) for device in DEVICES]
            store.broadcast(key, mx.nd.ones(shape) * (store.rank + 1), out)
            equal(out[0], np.ones(shape, np.float32))
            store.pushpull(key, mx.nd.ones(shape) * (store.rank + 1), out=out)
            for one in out:
                equal(one, np.full(shape, 3, np.float32))
            store.push(key, mx.nd.ones(shape))
            store.pull(key, out=out)
            equal(out[1], np.full(shape, 2, np.float32))


def pushpull_takes_lists_of_keys(store: KVStoreBase) -> None:
    keys = [60, 61, 62]
    store.init(keys, [mx.nd.zeros((n + 1, 999)) for n in range(3)])
    values = [mine(store, (n + 1, 999), n) for n in range(3)]
    outs = [mx.nd.zeros((n + 1, 999)) for n in range(3)]
    store.pushpull(keys, values, out=outs)
    for n, out in enumerate(outs):
        equal(out, total((n + 1, 999), n))


def devices_are_summed_and_all_get_the_result(store: KVStoreBase) -> None:
    for n, shape in enumerate([(1,), SMALL, BIG]):
        store.init(f"devices{n}", mx.nd.zeros(shape))
        # Whole numbers: the sum over four arrays is exact in any order.
        values = [mx.nd.full(shape, 10 * store.rank + i + 1, ctx=c) for i, c in enumerate(DEVICES)]
        outs = [mx.nd.zeros(shape, ctx=device) for device in DEVICES]
        store.pushpull(f"devices{n}", values, out=outs)
        for out in outs:
            equal(out, np.full(shape, 1 + 2 + 11 + 12, np.float32))
        store.pushpull(f"devices{n}", values)
        for value, device in zip(values, DEVICES):
            assert value.context == device
            equal(value, np.full(shape, 26, np.float32))
        store.push(f"devices{n}", values)
        store.pull(f"devices{n}", out=outs)
        for out in outs:
            equal(out, np.full(shape, 4 * 26, np.float32))


def a_device_that_is_not_the_first_is_enough(store: KVStoreBase) -> None:
    store.init("device 1", mx.nd.zeros(SMALL, ctx=mx.cpu(1)))
    value = mx.nd.full(SMALL, store.rank + 1, ctx=mx.cpu(1))
    store.pushpull("device 1", value)
    assert value.context == mx.cpu(1)
    equal(value, np.full(SMALL, 3, np.float32))


def arrays_of_mx_np_are_summed_over_devices_too(store: KVStoreBase) -> None:
    with mx.util.np_shape(True):
        store.init("np", mx.np.zeros(SMALL))
        values = [mx.np.ones(SMALL, ctx=device) * (store.rank + 1) for device in DEVICES]
        outs = [mx.np.zeros(SMALL, ctx=device) for device in DEVICES]
        store.pushpull("np", values, out=outs)
        for out, device in zip(outs, DEVICES):
            assert out.context == device
            equal(out, np.full(SMALL, 6, np.float32))


def a_key_that_stands_in_a_call_twice_is_summed_once(store: KVStoreBase) -> None:
    store.init(["twice", "once"], [mx.nd.zeros(SMALL), mx.nd.zeros(SMALL)])
    one, two, other = mx.nd.full(SMALL, 1), mx.nd.full(SMALL, 2), mx.nd.full(SMALL, 7)
    store.push(["twice", "once", "twice"], [one, other, two])
    outs = [mx.nd.zeros(SMALL) for _ in range(3)]
    store.pull(["twice", "once", "twice"], out=outs)
    for out, each in zip(outs, (3, 7, 3)):
        equal(out, np.full(SMALL, WORKERS * each, np.float32))
    store.pushpull(["twice", "twice"], [one, two], out=outs[:2])
    for out in outs[:2]:
        equal(out, np.full(SMALL, WORKERS * 3, np.float32))
    with pytest.raises(KeyMismatchError, match="'new' is to be initialised twice"):
        store.init(["new", "new"], [one, two])


def nothing_is_written_into_an_array_that_is_no_fit(store: KVStoreBase) -> None:
    """Its memory would end before the value does, and other arrays' memory would be next."""
    for out in (mx.nd.zeros((16,)), mx.nd.zeros((4000,), dtype="bool")):
        for outs in (out, [mx.nd.zeros((4000,)), out]):
            with pytest.raises((KeyMismatchError, NotSupportedError)):
                store.broadcast("fits", mx.nd.ones((4000,)), out=outs)
            equal(out, np.zeros(out.shape, out.dtype))
    store.broadcast("fits", mx.nd.ones((4000,)), out=mx.nd.zeros((4000,)))
    store.init("fits beside", mx.nd.zeros((4000,)))
    out = mx.nd.zeros((16,))
    for outs in (out, [mx.nd.zeros((4000,)), out], [out, mx.nd.zeros((4000,))]):
        with pytest.raises(KeyMismatchError, match="shape"):
            store.pull("fits", out=outs)
        with pytest.raises(KeyMismatchError, match="shape"):
            store.pushpull("fits", mx.nd.ones((4000,)), out=outs)
        # Of several keys none is pushed where one is refused.
        with pytest.raises(KeyMismatchError, match="shape"):
            value = mx.nd.ones((4000,))
            store.pushpull(["fits beside", "fits"], [value, value], out=[value, outs])
    equal(out, np.zeros((16,), np.float32))
    for key in ("fits", "fits beside"):
        value = mx.nd.ones((4000,))
        store.pushpull(key, value)
        equal(value, np.full((4000,), WORKERS, np.float32))


def a_worker_may_push_before_another_knows_the_key(store: KVStoreBase) -> None:
    value = mine(store, BIG)
    if store.rank != 0:
        store.init("early", mx.nd.ones(BIG))
        store.pushpull("early", value)
        store.push("early", mx.nd.ones(BIG))
        store._barrier()
    else:
        store._barrier()
        store.init("early", mx.nd.ones(BIG))
        store.pushpull("early", value)
        store.push("early", mx.nd.ones(BIG))
    equal(value, total(BIG))


def several_pushes_may_come_before_a_pull(store: KVStoreBase) -> None:
    store.init("pushes", mx.nd.zeros(BIG))
    for n in range(5):
        store.push("pushes", mine(store, BIG, n))
    out = mx.nd.zeros(BIG)
    store.pull("pushes", out=out)
    equal(out, total(BIG, 4))


def several_pulls_may_be_under_way_at_once(store: KVStoreBase) -> None:
    store.init("pulls", mx.nd.zeros(BIG))
    outs = []
    for n in range(4):
        store.push("pulls", mine(store, BIG, n))
        outs.append(mx.nd.zeros(BIG))
        store.pull("pulls", out=outs[-1])
    for n, out in enumerate(outs):
        equal(out, total(BIG, n))


def a_pull_whose_array_is_free_late_gets_the_value_of_its_place(store: KVStoreBase) -> None:
    """As a Trainer does it: the weight is still read when its initial value is to come, and the
    gradients are ready."""
    initial, out = random(BIG, 7), mx.nd.zeros(BIG)
    gradients = [mine(store, BIG, n) for n in range(2)]
    mx.nd.waitall()
    with read(out):
        if store.rank == 0:
            store.init("late", mx.nd.array(initial))
            store.pull("late", out=out)
        else:
            store.broadcast("late", out, out=out)
        for gradient in gradients:
            store.pushpull("late", gradient)
        time.sleep(0.3)
    equal(out, initial)
    for n, gradient in enumerate(gradients):
        equal(gradient, total(BIG, n))
    with read(out):
        store.pull("late", out=out)
        store.push("late", mx.nd.ones(BIG))
        time.sleep(0.3)
    equal(out, total(BIG, 1))


def a_round_may_begin_before_the_last_one_is_over(store: KVStoreBase) -> None:
    store.init("rounds", mx.nd.zeros(BIG))
    outs = []
    for n in range(4):
        outs.append(mx.nd.zeros(BIG))
        store.pushpull("rounds", mine(store, BIG, n), out=outs[-1])
    for n, out in enumerate(outs):
        equal(out, total(BIG, n))


def priorities_may_be_any_numbers_of_32_bits(store: KVStoreBase) -> None:
    keys = [f"priority{n}" for n in range(4)]
    store.init(keys, [mx.nd.zeros(SMALL)] * 4)
    for key, priority in zip(keys, (-(2**31), -1, 0, 2**31 - 1)):
        value = mx.nd.ones(SMALL)
        store.pushpull(key, value, priority=priority)
        equal(value, np.full(SMALL, 2, np.float32))
    with pytest.raises(ValueError, match="priority"):
        store.push(keys[0], mx.nd.ones(SMALL), priority=2**31)


def a_gradient_may_be_changed_as_soon_as_it_is_pushed(store: KVStoreBase) -> None:
    store.init("changed", mx.nd.zeros(BIG))
    value, out = mine(store, BIG), mx.nd.zeros(BIG)
    store.pushpull("changed", value, out=out)
    value[:] = 0
    store.push("changed", value)
    value[:] = 7
    equal(out, total(BIG))
    store.pull("changed", out=out)
    equal(out, np.zeros(BIG, np.float32))


def a_barrier_waits_for_all(store: KVStoreBase) -> None:
    folder = Path(sys.argv[1])
    for n in range(3):
        mark = folder / f"mark{n}"
        if store.rank == n % WORKERS:
            mark.touch()
        store._barrier()
        assert mark.exists()


def mistakes_are_told_where_they_are_made_and_harm_nothing(store: KVStoreBase) -> None:
    store.init("mistakes", mx.nd.zeros(SMALL))
    with pytest.raises(KeyMismatchError, match="'unknown' is unknown"):
        store.push("unknown", mx.nd.ones(SMALL))
    with pytest.raises(KeyMismatchError, match="initialised before"):
        store.init("mistakes", mx.nd.zeros(SMALL))
    for wrong in (mx.nd.ones((3, 2)), mx.nd.ones(SMALL, dtype="float64")):
        with pytest.raises(KeyMismatchError, match="shape"):
            store.push("mistakes", wrong)
    with pytest.raises(KeyMismatchError, match="float"):
        store.init(1.5, mx.nd.zeros(SMALL))
    with pytest.raises(NotSupportedError, match="sparse"):
        store.init("sparse", mx.nd.zeros(SMALL).tostype("csr"))
    with pytest.raises(NotSupportedError, match="dtype bool, which can't be summed"):
        store.init("no sums", mx.nd.zeros(SMALL, dtype="bool"))
    with pytest.raises(ValueError, match="2 keys are given with 1 values"):
        store.init(["a", "b"], [mx.nd.zeros(SMALL)])
    with pytest.raises(TypeError, match="NDArray"):
        store.init("numpy", np.zeros(SMALL))
    with pytest.raises(TypeError, match="out="):
        store.pull("mistakes")
    value = mx.nd.ones(SMALL)
    store.pushpull("mistakes", value)
    equal(value, np.full(SMALL, 2, np.float32))


def the_test_optimizer_adds_up_pushes(store: KVStoreBase) -> None:
    """The nightly test itself: weight += rate * sum, seven times."""
    shapes = {"t3": SMALL, "t5": SMALL, "t7": SMALL, "t99": BIG}
    store.init(list(shapes), [mx.nd.ones(shape) for shape in shapes.values()])
    store.set_optimizer(mx.optimizer.create("test", rescale_grad=RATE))
    for key, shape in shapes.items():
        for i in range(7):
            store.push(key, mx.nd.ones(shape) * (store.rank + 1))
            expected = (WORKERS + 1) * WORKERS * RATE / 2 * (i + 1) + 1
            value = mx.nd.zeros(shape)
            store.pull(key, out=value)
            equal(value, np.full(shape, expected, np.float32))


def every_push_before_a_pull_is_an_update(store: KVStoreBase) -> None:
    store.init("updates", mx.nd.ones(BIG))
    for _ in range(6):
        store.push("updates", mx.nd.ones(BIG) * (store.rank + 1))
    value = mx.nd.zeros(BIG)
    store.pull("updates", out=value)
    equal(value, np.full(BIG, 1 + 6 * RATE * 3, np.float32))


def a_late_pull_is_of_no_later_update(store: KVStoreBase) -> None:
    store.init("late update", mx.nd.ones(BIG))
    out = mx.nd.zeros(BIG)
    mx.nd.waitall()
    store.push("late update", mx.nd.ones(BIG))
    with read(out):
        store.pull("late update", out=out)
        store.push("late update", mx.nd.ones(BIG))
        time.sleep(0.3)
    equal(out, np.full(BIG, 1 + WORKERS * RATE, np.float32))
    store.pull("late update", out=out)
    equal(out, np.full(BIG, 1 + 2 * WORKERS * RATE, np.float32))


def pushpull_gives_the_updated_weight_to_all_devices(store: KVStoreBase) -> None:
    store.init("updated", mx.nd.ones(BIG))
    gradients = [mx.nd.full(BIG, store.rank + 1, ctx=device) for device in DEVICES]
    weights = [mx.nd.zeros(BIG, ctx=device) for device in DEVICES]
    for i in range(3):
        store.pushpull("updated", gradients, out=weights)
        for weight in weights:
            equal(weight, np.full(BIG, 1 + (i + 1) * RATE * 6, np.float32))
    for gradient in gradients:
        equal(gradient, np.full(BIG, store.rank + 1, np.float32))


CHECKS = [
    it_says_who_it_is,
    init_gives_rank_0_s_values_to_all,
    a_list_of_keys_is_initialised_and_pulled_at_once,
    numbers_and_texts_are_different_keys,
    broadcast_gives_rank_0_s_value_to_all_devices,
    broadcast_takes_lists_of_keys,
    every_shape_is_summed_whole,
    without_out_the_sum_takes_the_place_of_the_gradient,
    float64_keeps_its_digits,
    arrays_without_elements_and_without_axes_are_keys_too,
    pushpull_takes_lists_of_keys,
    devices_are_summed_and_all_get_the_result,
    a_device_that_is_not_the_first_is_enough,
    arrays_of_mx_np_are_summed_over_devices_too,
    a_key_that_stands_in_a_call_twice_is_summed_once,
    nothing_is_written_into_an_array_that_is_no_fit,
    a_worker_may_push_before_another_knows_the_key,
    several_pushes_may_come_before_a_pull,
    several_pulls_may_be_under_way_at_once,
    a_pull_whose_array_is_free_late_gets_the_value_of_its_place,
    a_round_may_begin_before_the_last_one_is_over,
    priorities_may_be_any_numbers_of_32_bits,
    a_gradient_may_be_changed_as_soon_as_it_is_pushed,
    a_barrier_waits_for_all,
    mistakes_are_told_where_they_are_made_and_harm_nothing,
    # From here on the servers have an optimizer.
    the_test_optimizer_adds_up_pushes,
    every_push_before_a_pull_is_an_update,
    a_late_pull_is_of_no_later_update,
    pushpull_gives_the_updated_weight_to_all_devices,
]


if __name__ == "__main__":
    run(CHECKS, mx.kv.create("p3"), sys.argv[1])
