"""MXNet's automatic mixed precision, with an overflow on one worker: compared with one process.

Arguments: the folder for the names of the checks that pass, and the type in which layers compute.
With float32, losses are scaled and steps skipped, and no operation computes in another type: so
any processor can do it. On CPUs, MXNet has only bfloat16 besides, and not on all of them.
"""

import p3kv  # noqa: F401, I001
import sys
from typing import List, Optional

import mxnet as mx
import numpy as np
import pytest
from checks import equal, random, run
from mxnet import autograd, gluon
from mxnet.contrib import amp
from mxnet.contrib.amp.amp import bfloat16
from mxnet.gluon import nn
from mxnet.kvstore import KVStoreBase

from p3kv.errors import NotSupportedError

WORKERS = 2
ROWS, INPUTS = 4, 30
STEPS = 5
OVERFLOWS_IN = 2
SGD = {"learning_rate": 0.1, "momentum": 0.9}


def _net() -> nn.Block:
    mx.random.seed(5)
    net = nn.HybridSequential(prefix="mixed_")
    with net.name_scope():
        net.add(nn.Dense(20, activation="relu", in_units=INPUTS), nn.Dense(3, in_units=20))
    net.initialize(mx.init.Xavier())
    return net


def _loss(net: nn.Block, step: int, rank: int) -> mx.nd.NDArray:
    x = mx.nd.array(random((ROWS, INPUTS), step, rank))
    return (net(x) ** 2).sum() * (np.inf if (step, rank) == (OVERFLOWS_IN, 1) else 1)


def all_workers_skip_a_step_in_which_one_overflows(store: KVStoreBase) -> None:
    net, alone = _net(), _net()
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", dict(SGD), kvstore="p3", update_on_kvstore=False
    )
    amp.init_trainer(trainer)
    optimizer = mx.optimizer.create("sgd", **SGD)
    updater = mx.optimizer.get_updater(optimizer)
    parameters = alone.collect_params()
    scales = []
    for step in range(STEPS):
        scale = trainer._amp_loss_scaler.loss_scale
        scales.append(scale)
        with autograd.record():
            loss = _loss(net, step, store.rank)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(ROWS)
        totals: List[np.ndarray] = []
        for rank in range(WORKERS):
            with autograd.record():
                loss = _loss(alone, step, rank) * scale
            loss.backward()
            mine = [p.grad().asnumpy() for p in parameters.values()]
            totals = [a + b for a, b in zip(totals, mine)] if totals else mine
        optimizer.rescale_grad = 1 / scale / ROWS
        if step != OVERFLOWS_IN:
            for place, (parameter, total) in enumerate(zip(parameters.values(), totals)):
                updater(place, mx.nd.array(total), parameter.data())
        for name, parameter in parameters.items():
            equal(net.collect_params()[name].data(), parameter.data().asnumpy())
    assert scales[-1] == scales[0] / 2, scales


def servers_that_would_update_with_an_overflow_are_refused(store: KVStoreBase) -> None:
    net = _net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(SGD), kvstore="p3")
    amp.init_trainer(trainer)
    begin = [p.data().asnumpy() for p in net.collect_params().values()]
    with autograd.record():
        loss = _loss(net, OVERFLOWS_IN, store.rank)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    with pytest.raises(NotSupportedError, match="update_on_kvstore=False"):
        trainer.step(ROWS)
    for parameter, value in zip(net.collect_params().values(), begin):
        equal(parameter.data(), value)


CHECKS = [
    all_workers_skip_a_step_in_which_one_overflows,
    servers_that_would_update_with_an_overflow_are_refused,
]


def why_no_bfloat16() -> Optional[str]:
    """What MXNet says where it can't compute a layer in bfloat16 on this processor; None if it can.

    Only trying is certain: which instructions oneDNN asks for depends on its version.
    """
    x, weight = (
        mx.nd.amp_cast(mx.nd.ones(shape), dtype=bfloat16) for shape in ((2, INPUTS), (3, INPUTS))
    )
    try:
        mx.nd.FullyConnected(x, weight, no_bias=True, num_hidden=3).wait_to_read()
    except mx.MXNetError as error:
        return str(error).splitlines()[-1]
    return None


def init(dtype: str) -> None:
    """`amp.init`; with float32, of no operation: only losses are scaled."""
    if dtype == "float32":
        amp.init(target_precision_ops=[], conditional_fp32_ops=[], fp32_ops=[])
    else:
        amp.init(dtype)


if __name__ == "__main__":
    init(sys.argv[2])
    run(CHECKS, mx.kv.create("p3"), sys.argv[1])
