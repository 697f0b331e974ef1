"""An optimizer that takes its time; servers import it because P3KV_OPTIMIZERS names this module."""

import time

import mxnet as mx


@mx.optimizer.register
class Slow(mx.optimizer.SGD):
    """Each update of a slice takes as long as its setting says."""

    p3kv_by_slice = True

    def __init__(self, update_s, **arguments):
        super().__init__(**arguments)
        self.update_s = update_s

    def update(self, index, weight, grad, state):
        time.sleep(self.update_s)
        super().update(index, weight, grad, state)

    def update_multi_precision(self, index, weight, grad, state):
        time.sleep(self.update_s)
        super().update_multi_precision(index, weight, grad, state)
