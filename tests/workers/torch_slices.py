"""Runs each optimizer as servers do, on slices, whole tensors or rows, and compares the weight with
that of `step()` of torch's own class on the whole weight, bit for bit. Belongs to no job."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import torch

from p3kv.frontends.torch.optimizers.optimizer_settings import BY_ROWS, BY_SLICE, BY_TENSOR, plain
from p3kv.frontends.torch.optimizers.server_optimizer import TorchOptimizer
from p3kv.frontends.torch.tensors import sparse_tensor
from p3kv.server.optimizer import WHOLE
from p3kv.wire.messages import DeclaredKey, encode

SHAPE, STEPS, WORKERS = (61, 53), 8, 3
ENDS = (0, 7, 8, 1001, 2683, 61 * 53)
"""Where slices end, mostly at odd places."""
FURTHER: List[Tuple[str, Dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("AdamW", {"amsgrad": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]


class Pair:
    """A weight that torch trains, and its copy that a server trains."""

    def __init__(self, name: str, settings: Dict[str, Any]) -> None:
        self.random = np.random.default_rng(5)
        self.value = self.random.standard_normal(SHAPE, np.float32)
        self.weight = torch.nn.Parameter(torch.from_numpy(self.value.copy()))
        self.own = getattr(torch.optim, name)([self.weight], lr=0.1, **settings)
        self.key = DeclaredKey(0, "w", SHAPE, "float32", [(0, self.value.size)])
        self.served = TorchOptimizer()

    def begin_step(self, step: int, gradient: torch.Tensor) -> None:
        """A step of torch's, and what the server is told of it: a schedule changes the rate."""
        (group,) = self.own.param_groups
        group["lr"] *= 0.9
        settings = plain(self.own, {id(self.weight): "w"}, 1, WORKERS)
        self.served.configure(step, encode(settings), step)
        self.weight.grad = gradient
        with torch.enable_grad():  # as in a script
            self.own.step()

    def compare(self) -> None:
        assert not np.array_equal(self.weight.detach(), Pair("SGD", {}).value), "nothing learned"
        np.testing.assert_array_equal(self.weight.detach(), self.value)


def check_slices(name: str, settings: Dict[str, Any], ends: Tuple[int, ...]) -> None:
    pair = Pair(name, settings)
    is_whole = len(ends) == 2
    for step in range(1, STEPS + 1):
        total = pair.random.standard_normal(SHAPE, np.float32)
        pair.begin_step(step, torch.from_numpy(total) / WORKERS)
        for index, (start, end) in enumerate(zip(ends, ends[1:])):
            # Slices have memory of their own, and another one perhaps in each step.
            weight, part = (one.reshape(-1)[start:end].copy() for one in (pair.value, total))
            pair.served.update(pair.key, WHOLE if is_whole else index, weight, part, step)
            pair.value.reshape(-1)[start:end] = weight
    pair.compare()


def check_rows(name: str) -> None:
    pair = Pair(name, {})
    for step in range(1, STEPS + 1):
        numbers = np.unique(pair.random.integers(SHAPE[0], size=20))
        rows = pair.random.standard_normal((len(numbers), SHAPE[1]), np.float32)
        mean = torch.from_numpy(rows) / WORKERS
        pair.begin_step(step, sparse_tensor(numbers, mean, SHAPE))
        pair.served.update_rows(pair.key, pair.value, numbers, rows, step)
    pair.compare()


def main() -> None:
    for name, settings in [*((name, {}) for name in BY_SLICE), *FURTHER]:
        check_slices(name, settings, ENDS)
    for name in BY_TENSOR:
        check_slices(name, {}, (0, ENDS[-1]))
    for name in BY_ROWS:
        check_rows(name)
    print(f"right: {', '.join(sorted({*BY_SLICE, *BY_TENSOR, *BY_ROWS}))}")


if __name__ == "__main__":
    main()
