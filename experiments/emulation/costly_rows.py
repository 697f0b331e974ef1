"""Has a server wait ROW_S seconds for each row that SGD updates; P3KV_OPTIMIZERS names this module.

It stands for servers that update one row after the other on cores of their own, as the paper's do:
waiting takes none of this machine's. SGD stays MXNet's own class, because others update no rows.
"""

import os
import time
from typing import Any, Callable

import mxnet as mx

ROW_S = float(os.environ["ROW_S"])


def _slower(update: Callable[..., None]) -> Callable[..., None]:
    def waiting(self: Any, index: Any, weight: Any, grad: Any, state: Any) -> None:
        gradients = grad if isinstance(grad, (list, tuple)) else [grad]
        rows = sum(one.indices.shape[0] for one in gradients if one.stype == "row_sparse")
        time.sleep(ROW_S * rows)
        update(self, index, weight, grad, state)

    return waiting


mx.optimizer.SGD.update_multi_precision = _slower(mx.optimizer.SGD.update_multi_precision)
