"""Optimizers of a user's own, which servers import because P3KV_OPTIMIZERS names this module."""

import mxnet as mx


@mx.optimizer.register
class ByNorm(mx.optimizer.SGD):
    """Steps of the rate's length, whatever the gradient's; remembers them by name."""

    def __init__(self, needed, **arguments):
        super().__init__(**arguments)
        self.needed = needed

    def create_state(self, index, weight):
        return {"sum": mx.nd.zeros(weight.shape, dtype=weight.dtype), "count": [0]}

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state["count"][0] += 1
        state["sum"][:] += grad * self.rescale_grad
        norm = state["sum"].norm() + self.needed["least"] * state["count"][0]
        weight[:] -= self._get_lr(index) * state["sum"] / norm

    def update_multi_precision(self, index, weight, grad, state):
        for arguments in zip(index, weight, grad, state):
            self.update(*arguments)

    def create_state_multi_precision(self, index, weight):
        return self.create_state(index, weight)


@mx.optimizer.register
class Cubic(mx.optimizer.Optimizer):
    """Element by element, and says so."""

    p3kv_by_slice = True

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, dtype=weight.dtype)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state[:] += grad * self._index_update_count[index]
        weight[:] -= self._get_lr(index) * state * state * state


@mx.optimizer.register
class Counting(mx.optimizer.Optimizer):
    """Steps as long as there were updates."""

    p3kv_by_slice = True

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight[:] -= grad * self.num_update


@mx.optimizer.register
class Jittering(mx.optimizer.Optimizer):
    """Adds random numbers, as a user's own may."""

    def update(self, index, weight, grad, state):
        weight[:] += mx.nd.random.normal(shape=weight.shape, dtype=weight.dtype)


@mx.optimizer.register
class Forgetful(mx.optimizer.Optimizer):
    """Counts calls in itself, for all keys together."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.calls = 0

    def update(self, index, weight, grad, state):
        self.calls += 1
        weight[:] -= grad * self.calls
