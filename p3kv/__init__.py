"""Priority-based parameter propagation (P3, SysML'19) for PyTorch and MXNet.

import p3kv.torch                  # first: servers and scheduler start here
...
optimizer = p3kv.torch.Optimizer(model, torch.optim.AdamW(model.parameters()))

import p3kv                        # with MXNet
...
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="p3")
"""

from p3kv.common import terminal

terminal.end_silently()

from p3kv import frontends  # noqa: E402  the imports that take time
from p3kv.common.version import VERSION as __version__  # noqa: E402
from p3kv.config import configure  # noqa: E402
from p3kv.processes import roles  # noqa: E402  the imports that take time

__all__ = ["__version__", "configure"]

terminal.raise_again()
frontends.register()
roles.take_over()
frontends.attach(frontends.FRONT_ENDS)
