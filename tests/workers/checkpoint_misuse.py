"""What can't go on from checkpoints of `continued.py`, or have any, is refused with the reason."""

import p3kv  # noqa: F401, I001
import mxnet as mx
import pytest
from mxnet import gluon
from resumed import CASES, SHAPES, made

from p3kv.errors import CheckpointError, ConfigError, NotSupportedError


def parameter(name: str, shape: tuple) -> gluon.Parameter:
    one = gluon.Parameter(name, shape=shape)
    one.initialize()
    return one


def another_optimizer(store: mx.kvstore.KVStoreBase) -> None:
    with pytest.raises(CheckpointError, match="is of the optimizer SGD, and this script sets Adam"):
        store.set_optimizer(mx.optimizer.create("adam"))


def another_shape(store: mx.kvstore.KVStoreBase) -> None:
    with pytest.raises(
        CheckpointError, match=r"parameter 'scheduled0' \(key 0\) with shape \(37, 23\).*\(38, 23\)"
    ):
        gluon.Trainer([parameter("scheduled0", (38, 23))], made(CASES["scheduled"]), kvstore=store)


def another_dtype(store: mx.kvstore.KVStoreBase) -> None:
    with pytest.raises(CheckpointError, match=r"dtype float32, and this script.*dtype float64"):
        store.init(0, mx.nd.zeros(SHAPES[0], dtype="float64"))


def states_of_other_settings(store: mx.kvstore.KVStoreBase) -> None:
    """Without `multi_precision` there is no float32 copy of the weight."""
    store.set_optimizer(mx.optimizer.create("sgd", momentum=0.9))
    with pytest.raises(CheckpointError, match="the checkpoint has for key 0 the state"):
        store.init(0, mx.nd.zeros(SHAPES[0], dtype="float16"))


def another_key(store: mx.kvstore.KVStoreBase) -> None:
    with pytest.raises(CheckpointError, match=r"has no key 'more', of shape \(2, 2\)"):
        store.init("more", mx.nd.zeros((2, 2)))


def main() -> None:
    # In the order of the stores of `continued.py`.
    for check in (
        another_optimizer, another_shape, another_dtype, states_of_other_settings, another_key
    ):  # fmt: skip
        check(mx.kv.create("p3"))
    with pytest.raises(ConfigError, match=r"'late' has no value yet.*run one forward pass"):
        late = gluon.Parameter("late", shape=(0, 3), allow_deferred_init=True)
        late.initialize()
        gluon.Trainer([late], "sgd", kvstore="p3")
    # By another kind of rule.
    with pytest.raises(CheckpointError, match="script's is a rule by which each push is an up"):
        mx.kv.create("dist_async_p3").set_optimizer(mx.optimizer.create("sgd"))
    begun = mx.kv.create("p3")
    while begun.resumed_steps:  # those of the stores that `continued.py` has beside
        begun = mx.kv.create("p3")
    begun.init("sum", mx.nd.zeros(3))
    with pytest.raises(NotSupportedError, match="'sum' is pushed to a store without an optimizer"):
        begun.push("sum", mx.nd.ones(3))
    print("all is refused")


main()
