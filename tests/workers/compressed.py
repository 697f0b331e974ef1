"""Gradients in two bits, by p3kv and by MXNet's own store, which have to give the same values.

At the end p3kv's workers choose differently, which ends the job.
Arguments: the store's name, and the folder into which worker rank 0 writes all values.
"""

import sys

NAME, FOLDER = sys.argv[1:]
if NAME == "p3":
    import p3kv  # noqa: F401
    from p3kv.errors import KeyMismatchError
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

ROUNDS = 12
SIZES = {"wide": 1203, "narrow": 40}
THRESHOLD = 0.3  # of which no multiple but one is exact in float32


def gradient(key, rank, round_):
    random = np.random.RandomState([len(key), rank, round_])
    return (random.standard_normal(SIZES[key]) * 0.3).astype(np.float32)


def by_pushes(store):
    """The store's values after each round: of sums, and then of an optimizer."""
    seen = {}
    for key, size in SIZES.items():
        initial = np.linspace(-1, 1, size, dtype=np.float32)
        store.init(key, mx.nd.array(initial if store.rank == 0 else 0 * initial))
        value = mx.nd.zeros(size)
        store.pull(key, out=value)
        np.testing.assert_array_equal(value.asnumpy(), initial)  # initial values are exact
    for round_ in range(2 * ROUNDS):
        if round_ == ROUNDS:
            store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25, momentum=0.9, wd=0.01))
            store._barrier()
        for key, size in SIZES.items():
            store.push(key, mx.nd.array(gradient(key, store.rank, round_)))
            value = mx.nd.full(size, np.nan)
            store.pull(key, out=value)
            seen[f"{key} {round_}"] = value.asnumpy()
    return seen


def by_a_trainer(store, compression_params):
    """A Trainer's weights, and the bytes that it sends, beside what they have to be."""
    net = gluon.nn.Dense(50, in_units=60, use_bias=False)
    net.initialize(mx.init.Constant(0.5))
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store,
        compression_params=compression_params,
    )  # fmt: skip
    weight = np.full((50, 60), 0.5, np.float32)
    residuals = np.zeros((store.num_workers, *weight.shape), np.float32)
    sent_bytes = 0
    for step in range(ROUNDS):
        inputs = np.random.RandomState(step).standard_normal((store.num_workers, 60)) * 0.3
        with autograd.record():
            loss = net(mx.nd.array(inputs[store.rank : store.rank + 1])).sum()
        loss.backward()
        mx.nd.waitall()
        before = store.stats()["bytes_sent"]
        trainer.step(1)
        for residual, one in zip(residuals, inputs.astype(np.float32)):
            residual += one  # the gradient: the same for all 50 outputs
            sent = (residual >= 0.25) * np.float32(0.25) - (residual <= -0.25) * np.float32(0.25)
            residual -= sent
            weight -= np.float32(0.5) * sent
        np.testing.assert_array_equal(net.weight.data().asnumpy(), weight, f"step {step}")
        if step > 0:  # the first one sends initial values, too
            sent_bytes += store.stats()["bytes_sent"] - before
    assert weight.size * 4 * (ROUNDS - 1) / sent_bytes > 15, sent_bytes


store = mx.kv.create(NAME)
store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
seen = by_pushes(store)
if store.rank == 0:
    np.savez(f"{FOLDER}/{NAME}.npz", **seen)
store._barrier()
if NAME == "p3":
    by_two_bits = {"type": "2bit", "threshold": np.float32(0.25)}
    by_a_trainer(mx.kv.create("p3"), by_two_bits)
    store = mx.kv.create("p3")
    store.set_gradient_compression(by_two_bits)
    for _ in range(2):  # two Trainers that are given the same store
        by_a_trainer(store, None)
    print("compressed by the Trainer")
    store = mx.kv.create("p3")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.25 * (1 + store.rank)})
    store._barrier()
    try:
        store.init("w", mx.nd.zeros(3))
        store._barrier()
    except KeyMismatchError as error:
        print(f"learned: {error}")
        raise
