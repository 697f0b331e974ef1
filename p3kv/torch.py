"""p3kv for PyTorch: `p3kv.torch.Optimizer` around one of `torch.optim`'s."""

import os

from p3kv.frontends.torch import compiled
from p3kv.frontends.torch.late import before_fork
from p3kv.frontends.torch.optimizer import Optimizer

compiled.install()
os.register_at_fork(before=before_fork)

__all__ = ["Optimizer"]
