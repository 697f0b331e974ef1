"""`import p3kv.torch.ddp`, before the model is wrapped, has p3kv train what a script wraps in
torch's DistributedDataParallel. Nothing else in the script changes."""

import p3kv.torch  # noqa: F401  its hooks
from p3kv.frontends.torch.parallel import TorchParallel as DistributedDataParallel
from p3kv.frontends.torch.parallel import take_over

take_over()

__all__ = ["DistributedDataParallel"]
