"""Priority-based parameter propagation (P3, SysML'19) as a key-value store for MXNet.

import p3kv                        # first: servers and scheduler start here
import mxnet as mx
...
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="p3")
"""

from p3kv import frontends, roles
from p3kv.config import configure
from p3kv.version import VERSION as __version__

__all__ = ["__version__", "configure"]

frontends.register()
roles.take_over()
frontends.attach(frontends.FRONT_ENDS)
