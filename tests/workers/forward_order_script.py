"""Trains a few steps, and writes down what the store has learned and what is true.

Arguments: a folder for a file of each worker's, and one of `SCENARIOS`.
"""

import p3kv  # noqa: F401, I001
import json
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo.vision import resnet
from mxnet.kvstore import KVStoreBase

STEPS = 4
KEYS = 12
FORWARD = [5, 0, 9, 3, 11, 1, 7, 2, 10, 4, 8, 6]
"""In the raw scripts: the keys in the order of their layers."""
SIZE = 50
WIDTH = 900
"""Of the matrices whose products the layers are: each takes longer than a busy machine lets a
thread wait."""


class Outcome(NamedTuple):
    """Keys in the order that the script's way of computing gives, and in that of its pushes."""

    truth: List[int]
    pushed: List[int]


class Net(nn.HybridBlock):
    """A small ResNet, a layer, and its weights once more."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.resnet = resnet.ResNetV1(
                resnet.BasicBlockV1, [1, 2, 1, 1], [8, 8, 16, 24, 32], classes=10, thumbnail=True
            )
            self.tied = nn.Dense(10, activation="tanh", in_units=10, prefix="tied_")
            self.between = nn.Dense(10, in_units=10, prefix="between_")
            self.again = nn.Dense(10, in_units=10, params=self.tied.params, prefix="again_")

    def hybrid_forward(self, F: object, x: mx.nd.NDArray) -> mx.nd.NDArray:
        return self.again(self.between(self.tied(self.resnet(x))))


def as_blocks(net: Net, x: mx.nd.NDArray) -> List[str]:
    """Names of the parameters of each block in the order in which the blocks begin."""
    names: Dict[str, None] = {}
    hooks = []

    def note(block: nn.HybridBlock, inputs: tuple) -> None:
        names.update(dict.fromkeys(p.name for p in block._reg_params.values()))

    net.apply(lambda block: hooks.append(block.register_forward_pre_hook(note)))
    net(x)
    for hook in hooks:
        hook.detach()
    return list(names)


def as_graph(net: Net, x: mx.nd.NDArray) -> List[str]:
    """Names of the variables in the order in which the graph's operations use them."""
    nodes = json.loads(net(mx.sym.Variable("data")).tojson())["nodes"]
    names: Dict[str, None] = {}
    for node in nodes:
        for source, *_ in node["inputs"]:
            if nodes[source]["op"] == "null" and nodes[source]["name"] != "data":
                names.setdefault(nodes[source]["name"])
    return list(names)


def train(store: KVStoreBase, hybridized: bool, reads_loss: bool) -> Outcome:
    """gluon's Trainer."""
    mx.random.seed(1)
    net = Net()
    net.initialize()
    x = mx.nd.random.normal(shape=(2, 3, 16, 16))
    if hybridized:
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    for _ in range(STEPS):
        with autograd.record():
            loss = net(x).square().sum()
        loss.backward()
        if reads_loss:
            mx.nd.waitall()  # more than a script does that prints the loss
            assert loss.asscalar() >= 0
        trainer.step(2)
    assert trainer._kvstore is store
    # What was put into gluon to learn the order is gone again.
    assert gluon.Parameter.data.__module__ == gluon.parameter.__name__
    mx.nd.waitall()
    names = as_graph(net, x) if hybridized else as_blocks(net, x)
    keys = trainer._param2idx
    pushed = [i for i, p in enumerate(trainer._params) if p.grad_req != "null"]
    return Outcome([keys[name] for name in names], pushed)


def blocks(store: KVStoreBase) -> Outcome:
    return train(store, hybridized=False, reads_loss=False)


def blocks_that_read_the_loss(store: KVStoreBase) -> Outcome:
    return train(store, hybridized=False, reads_loss=True)


def graph(store: KVStoreBase) -> Outcome:
    return train(store, hybridized=True, reads_loss=False)


def graph_that_reads_the_loss(store: KVStoreBase) -> Outcome:
    return train(store, hybridized=True, reads_loss=True)


def raw(store: KVStoreBase, wait: bool) -> Outcome:
    """Bare arrays: a chain of slow operations makes the gradients, the last layer's first."""
    weights = [mx.nd.zeros((SIZE,)) for _ in range(KEYS)]
    store.init(list(range(KEYS)), weights)
    matrix = mx.nd.full((WIDTH, WIDTH), 1 / WIDTH)
    for _ in range(STEPS):
        chain = matrix
        for key in FORWARD:
            chain = chain + 0 * weights[key].sum()
        gradients = {}
        for key in reversed(FORWARD):
            chain = mx.nd.dot(chain, matrix)
            gradients[key] = chain.reshape((-1,))[:SIZE] * 1
        if wait:
            mx.nd.waitall()
        for key in range(KEYS):
            store.pushpull(key, gradients[key], out=weights[key], priority=priority(key))
    mx.nd.waitall()
    return Outcome(FORWARD, list(range(KEYS)))


def priority(key: int) -> int:
    """What a raw script asks for: not the order of the keys, nor that of the layers."""
    return 1000 + 7 * key % KEYS


def gradients_in_time(store: KVStoreBase) -> Outcome:
    return raw(store, wait=False)


def gradients_all_at_once(store: KVStoreBase) -> Outcome:
    return raw(store, wait=True)


SCENARIOS = [
    blocks,
    blocks_that_read_the_loss,
    graph,
    graph_that_reads_the_loss,
    gradients_in_time,
    gradients_all_at_once,
]

if __name__ == "__main__":
    p3 = mx.kv.create("p3")
    outcome = {scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[2]](p3)
    written = {"learned": p3.forward_order, **outcome._asdict()}
    (Path(sys.argv[1]) / f"rank{p3.rank}.json").write_text(json.dumps(written))
