"""Sets an optimizer of the user's own that the servers have not imported."""

import p3kv  # noqa: F401, I001
import mxnet as mx
import own_mxnet_optimizers  # noqa: F401  it registers some

store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.create("cubic"))
store.init(0, mx.nd.ones(3))
value = mx.nd.zeros(3)
store.pushpull(0, mx.nd.ones(3), out=value)
value.wait_to_read()
