"""Tries what can't be combined, and checks what becomes of features that have no effect.

Arguments: which of the jobs of `test_combinations.py` this is, and a file that gets, for each
refusal, the error's class and its message.
"""

import json
import sys
from typing import Any, Callable, Dict

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

from p3kv.errors import P3Error

SIZE = 300
zeros, ones = mx.nd.zeros(SIZE), mx.nd.ones(SIZE)
rows = mx.nd.ones((4, 2)).tostype("row_sparse")
refusals: Dict[str, Any] = {}


def refused(one: str, other: str, call: Callable[..., Any], *arguments: Any) -> None:
    """Notes how a call is refused that combines two features."""
    refusals[f"{one} {other}"] = None
    try:
        call(*arguments)
    except P3Error as error:
        refusals[f"{one} {other}"] = type(error).__name__, str(error)


def a_store(key: Any = None, value: mx.nd.NDArray = zeros, kind: str = "p3") -> Any:
    """A store, with a key if one is given."""
    store = mx.kv.create(kind)
    if key is not None:
        store.init(key, value)
    return store


def has(array: mx.nd.NDArray, value: float) -> None:
    np.testing.assert_array_equal(array.asnumpy(), value)


def scaled_loss() -> None:
    amp.init(target_precision_ops=[], conditional_fp32_ops=[], fp32_ops=[])
    net = gluon.nn.Dense(3, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=a_store())
    amp.init_trainer(trainer)
    with autograd.record(), amp.scale_loss(net(mx.nd.ones((1, 2))).sum(), trainer) as loss:
        autograd.backward(loss)
    trainer.step(1)


def plain() -> None:
    store = a_store("w", kind="dist_async_p3")
    refused("NO_OPTIMIZER", "ASYNCHRONOUS", store.push, "w", ones)
    refused("SHARES_NUMBERS", "ASYNCHRONOUS", store.set_optimizer, mx.optimizer.Nadam())
    refused("CLIPPING", "ASYNCHRONOUS", store.clip_global_norm, 1.0)
    refused("STATES", "ASYNCHRONOUS", store.save_optimizer_states, "states")
    unset = a_store(kind="dist_async_p3")
    unset.set_optimizer(mx.optimizer.SGD())
    refused("OTHER_CUT", "ASYNCHRONOUS", unset.set_optimizer, mx.optimizer.LAMB())

    store = a_store("w")
    refused("WHOLE_TENSORS", "SPREAD_OUT", store.set_optimizer, mx.optimizer.LAMB())
    store.clip_global_norm(1.0)
    refused("CLIPPING", "NO_OPTIMIZER", store.push, "w", ones)
    updated = a_store([0, 1], [zeros, zeros.astype("int32")])
    updated.set_optimizer(mx.optimizer.Nadam())
    updated.push(0, ones)
    refused("SHARES_NUMBERS", "NO_GRADIENT", updated.push_no_gradient, 0)
    refused("INTEGERS", "OPTIMIZER", updated.push, 1, ones.astype("int32"))
    two_bits = a_store()
    two_bits.set_gradient_compression({"type": "2bit"})
    refused("ROWS", "REMEMBERING", two_bits.init, "w", rows)
    refused("SCALED_LOSS", "OPTIMIZER", scaled_loss)

    by_dgc = a_store()
    by_dgc.set_gradient_compression({"type": "dgc"})
    refused("MOMENTUM", "OTHER_THAN_SGD", by_dgc.set_optimizer, mx.optimizer.Adam())
    refused("MOMENTUM", "CLIPPING", by_dgc.clip_global_norm, 1.0)
    by_dgc.init("w", zeros)
    refused("MOMENTUM", "NO_OPTIMIZER", by_dgc.push, "w", ones)
    by_dgc.set_optimizer(mx.optimizer.SGD(momentum=0.9))
    refused("MOMENTUM", "STATES", by_dgc.save_optimizer_states, "states")

    compressed = a_store()
    compressed.set_gradient_compression({"type": "float16"})
    # Integers travel as they are, which no codec of floats could do.
    exact = mx.nd.full(SIZE, 2**20 + 1, dtype="int32")
    compressed.init("i", exact)
    compressed.pushpull("i", exact)
    has(exact, 2**20 + 1)


def checkpoints() -> None:
    refused("NO_OPTIMIZER", "CHECKPOINTS", a_store("w").push, "w", ones)
    silent = a_store()
    silent.set_gradient_compression({"type": "once"})
    refused("NO_MEMORY", "CHECKPOINTS", silent.init, "w", zeros)


def seldom() -> None:
    store = a_store("w")
    refused("NO_OPTIMIZER", "SELDOM", store.push, "w", ones)
    refused("ROWS", "SELDOM", store.init, "r", rows)
    refused("CLIPPING", "SELDOM", store.clip_global_norm, 1.0)
    by_dgc = a_store()
    by_dgc.set_gradient_compression({"type": "dgc"})
    refused("MOMENTUM", "SELDOM", by_dgc.init, "w", zeros)


def seldom_and_checkpoints() -> None:
    refused("SELDOM", "CHECKPOINTS", a_store)


def local() -> None:
    store = a_store("w")
    refused("ROWS", "LOCAL", store.init, "r", rows)
    refused("CLIPPING", "LOCAL", store.clip_global_norm, 1.0)
    by_dgc = a_store()
    by_dgc.set_gradient_compression({"type": "dgc"})
    refused("MOMENTUM", "LOCAL", by_dgc.init, "w", zeros)
    total = ones.copy()
    store.pushpull("w", total, out=total)
    has(total, 1)


def at_once() -> None:
    """In a job whose codec of values knows what each worker has."""
    refused("CLIPPING", "AT_ONCE", a_store().clip_global_norm, 1.0)
    refused("ROWS", "REMEMBERS_VALUES", a_store().init, "r", rows)


def ahead() -> None:
    """A worker would go on with the value of the round before."""
    store = a_store(["w", "r"], [zeros, mx.nd.zeros((4, 2)).tostype("row_sparse")])
    store.pushpull("w", ones, out=zeros)
    has(zeros, 1)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=-1.0))
    for push in range(1, 4):
        store.push("r", rows)
        store.row_sparse_pull("r", out=rows, row_ids=mx.nd.arange(4))
        has(rows, 2.0 ** (push - 1))


def predicts() -> None:
    """Servers predict by SGD with momentum, and rows come as they are."""
    store = a_store(["w", "r"], [zeros, mx.nd.zeros((4, 2)).tostype("row_sparse")])
    without = mx.optimizer.SGD(learning_rate=1.0)
    refused("PREDICTS", "NO_PREDICTION", store.set_optimizer, without)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5, rescale_grad=-1.0))
    out = mx.nd.zeros(SIZE)
    for value in (1.0 + 2 * 1.0, 2.5 + 2 * 1.5):
        store.pushpull("w", ones, out=out)
        has(out, value)


def on_hosts() -> None:
    """Two workers of a host, whose servers are elsewhere."""
    a_store("w", kind="dist_async_p3")
    compressed = a_store()
    compressed.set_gradient_compression({"type": "2bit"})
    compressed.init([1, 2], [zeros, zeros.astype("float16")])
    clipped = a_store()
    clipped.set_gradient_compression({"type": "dgc", "clip": 1.0})
    clipped.init("w", zeros)
    a_store("r", rows)


if __name__ == "__main__":
    case, file = sys.argv[1:]
    globals()[case]()
    mx.nd.waitall()
    with open(file, "w") as written:
        json.dump(refusals, written)
