"""gluon's Trainer, and beside it a training without a store: equal bit for bit, step by step.

Argument: the folder for the names of the checks that pass.
"""

import p3kv  # noqa: F401, I001
import sys
from functools import partial
from typing import Callable, List

import mxnet as mx
import numpy as np
import trainer_model as model
from checks import run
from mxnet import gluon
from mxnet.kvstore import KVStoreBase

ON_SERVERS = [
    "the_first_step_gives_rank_0_s_weights_to_all",
    "a_frozen_layer_is_rank_0_s_and_stays_so",
    "a_learning_rate_holds_from_the_next_step_on",
    "weights_that_inference_has_used_are_trained_on",
]
ON_WORKERS = [
    "gradients_of_all_devices_and_workers_are_clipped_by_their_global_norm",
    "weights_that_inference_has_used_are_trained_on",
]
CHECKS = [
    *[f"{name}_on_servers" for name in ON_SERVERS],
    *[f"{name}_on_workers" for name in ON_WORKERS],
]


class Training:
    """Two trainings of the same network: with a Trainer and a store, and alone."""

    def __init__(self, store: KVStoreBase, on_servers: bool) -> None:
        self._store = store
        self._on_servers = on_servers
        self._devices = [mx.cpu()] if on_servers else [mx.cpu(0), mx.cpu(1)]
        self._net = model.build(self._devices)
        self._trainer = gluon.Trainer(
            self._net.collect_params(), "sgd", dict(model.SGD), kvstore=store,
            update_on_kvstore=None if on_servers else False,
        )  # fmt: skip
        self._alone = model.Alone(store.num_workers, self._devices)
        self._step = 0
        self._norms: List[float] = []

    def the_first_step_gives_rank_0_s_weights_to_all(self, store: KVStoreBase) -> None:
        begin = [model.initial(rank)["0.weight"] for rank in range(store.num_workers)]
        assert not np.array_equal(begin[0], begin[1])
        self._train(1)
        assert self._trainer._update_on_kvstore is True

    def a_frozen_layer_is_rank_0_s_and_stays_so(self, store: KVStoreBase) -> None:
        self._train(1)
        for place in ("3.weight", "3.bias"):
            frozen = self._net._collect_params_with_prefix()[place]
            assert frozen.grad_req == "null"
            np.testing.assert_array_equal(frozen.data().asnumpy(), model.initial(0)[place])

    def a_learning_rate_holds_from_the_next_step_on(self, store: KVStoreBase) -> None:
        assert model.RATES[2] != model.RATES[1]
        self._train(2)

    def weights_that_inference_has_used_are_trained_on(self, store: KVStoreBase) -> None:
        while self._step < model.STEPS:
            self._infer()
            self._train(1)
        self._infer()

    def gradients_of_all_devices_and_workers_are_clipped_by_their_global_norm(
        self, store: KVStoreBase
    ) -> None:
        self._train(3)
        assert self._trainer._update_on_kvstore is False
        assert max(self._norms) > model.MAX_NORM

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            if self._step == 0:
                mx.random.seed(self._store.rank)  # for the weights whose shapes are not known yet
            x, y = model.part(self._step, self._store.rank)
            model.backward(self._net, model.late(x), y, self._devices)
            self._trainer.set_learning_rate(model.RATES[self._step])
            if self._on_servers:
                self._trainer.step(model.BATCH)
                self._alone.step(self._step, lambda gradients: None)
            else:
                self._trainer.allreduce_grads()
                self._clip()
                self._trainer.update(model.BATCH)
                self._alone.step(self._step, model.clip)
            self._step += 1
            self._compare()

    def _clip(self) -> None:
        trained = [p for p in self._net.collect_params().values() if p.grad_req != "null"]
        for device in range(len(self._devices)):
            self._norms.append(model.clip([p.list_grad()[device] for p in trained]))

    def _infer(self) -> None:
        mine, alone = model.infer(self._net, self._step), model.infer(self._alone.net, self._step)
        np.testing.assert_array_equal(mine, alone)

    def _compare(self) -> None:
        alone = model.weights(self._alone.net)
        for place, parameter in self._net._collect_params_with_prefix().items():
            for value in parameter.list_data():
                np.testing.assert_array_equal(
                    value.asnumpy(), alone[place], err_msg=f"{place} after step {self._step}"
                )


def check_of(training: Training, name: str, called: str) -> Callable[[KVStoreBase], None]:
    check = partial(getattr(training, name))
    check.__name__ = called  # type: ignore[attr-defined]
    return check


if __name__ == "__main__":
    p3 = mx.kv.create("p3")
    trainings = [Training(p3, True)] * len(ON_SERVERS)
    trainings += [Training(mx.kv.create("p3"), False)] * len(ON_WORKERS)
    run([*map(check_of, trainings, ON_SERVERS + ON_WORKERS, CHECKS)], p3, sys.argv[1])
