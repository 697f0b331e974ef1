"""Uses the store wrongly in many ways; each must be refused at once, by name.

Argument: a file that gets, for each way, the error's class, its message and the seconds it took.
"""

import p3kv  # noqa: I001
import json
import sys
import time
from typing import Any, Callable

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from p3kv.codecs import CODECS, Float16

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
refusals = {}


def refused(name: str, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    """Notes how a call is refused; an answer of None says that it was not."""
    start = time.monotonic()
    answer = None
    try:
        call(*arguments, **more)
        mx.nd.waitall()
    except Exception as error:  # noqa: BLE001  whatever it is, the test judges it
        answer = (type(error).__name__, str(error), time.monotonic() - start)
    refusals[name] = answer


def step(net: gluon.Block, x: mx.nd.NDArray, optimizer: str = "sgd", **more: Any) -> gluon.Trainer:
    """One step of a new Trainer; returns it."""
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1}, **more)
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    trainer.step(1)
    return trainer


class Doubles(Float16):
    """A codec of the user's own that most keys do not have."""

    @classmethod
    def carries(cls, dtype: np.dtype) -> bool:
        return dtype == np.float64


store = mx.kv.create("p3")
dense = gluon.nn.Dense(3, in_units=2)
dense.initialize()
x = mx.nd.ones((1, 2))
one = mx.nd.ones(3)
sparse = mx.nd.ones((4, 2)).tostype("row_sparse")

refused("configure too late", p3kv.configure, slice_size=7)
for call in ("push", "pull", "pushpull"):
    refused(f"{call} of an unknown key", getattr(store, call), "nobody", one)
refused("init of a csr array", store.init, "sparse", mx.nd.ones((4, 2)).tostype("csr"))
refused("init of bool", store.init, "mask", mx.nd.ones(3, dtype="bool"))
mask = gluon.Parameter("net_mask", shape=(3,), dtype="bool", grad_req="null")
mask.initialize(mx.init.Zero())
refused("a Trainer of bool", lambda: gluon.Trainer([mask], "sgd", kvstore="p3").step(1))
refused("init of bfloat16", store.init, "half", mx.nd.empty(3, dtype=BFLOAT16))
store.init("known", one)
refused("init of a known key", store.init, "known", one)
refused("pushpull of a sparse array", store.pushpull, "known", sparse)
refused("pushpull of another shape", store.pushpull, "known", mx.nd.ones(4))
refused("pushpull of another dtype", store.pushpull, "known", mx.nd.ones(3, dtype="float64"))
for wrong in (lambda: store.pull("nobody", out=one), lambda: store.push("known", mx.nd.ones(4))):
    with pytest.raises(mx.base.MXNetError):  # as with MXNet's own stores
        wrong()
refused("row_sparse_pull", store.row_sparse_pull, "known", out=sparse, row_ids=mx.nd.array([1]))
compress = store.set_gradient_compression
refused("compression too late", compress, {"type": "2bit", "threshold": 0.5})
refused("compression of an unknown type", compress, {"type": "3bit"})
refused("compression without a type", compress, {"threshold": 0.5})
refused("compression by lists", compress, {"type": "2bit", "threshold": [0.5]})
CODECS.register("doubles", Doubles)
refused("compression of other dtypes", compress, {"type": "doubles", "threshold": 0.5})
refused("compression by another parameter", compress, {"type": "2bit", "treshold": 0.5})
refused(
    "compression by the Trainer", step, dense, x, kvstore=mx.kv.create("p3"),
    compression_params={"type": "2bit", "threshold": 0},
)  # fmt: skip
refused("an optimizer as a command", store._send_command_to_servers, 0, "pickled")
refused("compression as a command", store._send_command_to_servers, 4, "1,0.5")
refused("a profiler's command", store._send_command_to_servers, 5, "profile")
refused("a script's own command", store._send_command_to_servers, 99, "hello")
refused("an updater", store._set_updater, print)
refused("a handle", getattr, store, "handle")
assert not hasattr(store, "handle")
profile = mx.profiler.set_state
refused("a profile of the servers", profile, "run", profile_process="server")
profile("stop")
refused("an unknown capability", store.is_capable, "teleport")

path = sys.argv[1] + ".states"
refused("states without an optimizer", store.save_optimizer_states, path)
trainer = step(dense, x, "adam", kvstore=store)
trainer.save_states(path)
refused("an update here", trainer._kvstore._updater, 0, one, one)
with open(path, "rb") as file:
    saved = file.read()


def refused_load(name: str, states: Any, optimizer: str = "adam") -> None:
    """Tries to load what MXNet would write with these states."""
    updater = mx.optimizer.get_updater(mx.optimizer.create(optimizer))
    updater.states = states
    with open(path, "wb") as file:
        file.write(states if isinstance(states, bytes) else updater.get_states(True))
    refused(name, trainer.load_states, path)


two = (mx.nd.ones(3), mx.nd.ones(3))
refused_load("states in no file of states", b"MXNet can't read this")
refused_load("half a file of states", saved[: len(saved) // 2])
refused_load("states that are none", [1])
refused_load("states of other keys", {7: two, "nobody": two})
refused_load("states of another shape", {0: two, 1: two})
refused_load("states of another optimizer", {1: mx.nd.ones(3)}, "adagrad")
refused_load("states of too few arrays", {1: mx.nd.ones(3)})
refused("states in a file that is not there", trainer.load_states, path + ".missing")
refused("states for a folder that is not there", trainer.save_states, path + "/missing/states")
trainer.save_states(path)
with open(path, "rb") as file:
    assert file.read() == saved, "a refused call has changed something"

with open(sys.argv[1], "w") as file:
    json.dump(refusals, file)
