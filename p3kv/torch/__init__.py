"""p3kv for PyTorch: `p3kv.torch.Optimizer` around one of `torch.optim`'s, `p3kv.torch.Embedding`,
whose table servers hold, and `p3kv.torch.ShareSampler`, which cuts batches by workers' speeds."""

import os

from p3kv.frontends.torch.embedding import Embedding
from p3kv.frontends.torch.optimizer import Optimizer, watch_clipping, watch_scalers
from p3kv.frontends.torch.refusals import watch_wrappers
from p3kv.frontends.torch.shares import ShareSampler
from p3kv.frontends.torch.values import compiled
from p3kv.frontends.torch.values.watched import before_fork, watch_collectives

compiled.install()
watch_wrappers()
watch_clipping()
watch_scalers()
watch_collectives()
os.register_at_fork(before=before_fork)

__all__ = ["Embedding", "Optimizer", "ShareSampler"]
