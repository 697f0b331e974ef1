"""p3kv for PyTorch: `p3kv.torch.Optimizer` around one of `torch.optim`'s."""

from p3kv.frontends.torch.optimizer import Optimizer

__all__ = ["Optimizer"]
