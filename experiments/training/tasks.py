"""What is trained: a network, its data, and how."""

from __future__ import annotations

from typing import Callable, NamedTuple

from mxnet import gluon

from experiments.training import data, networks
from experiments.training.data import Split


class Recipe(NamedTuple):
    """Hyper-parameters of SGD with momentum; the rate is that of a batch's mean gradient, and falls
    to zero along a cosine."""

    learning_rate: float
    momentum: float
    weight_decay: float


class Task(NamedTuple):
    """A network and its data. `batch` is each worker's, `score` what is told of it at the end."""

    title: str
    score: str
    data: Callable[[], Split]
    network: Callable[[], gluon.HybridBlock]
    batch: int
    epochs: int
    recipe: Recipe

    def steps(self, workers: int) -> int:
        """Of an epoch: what is left of a worker's samples waits for the next one."""
        return len(self.data().training) // workers // self.batch


TASKS = {
    "digits": Task(
        "ResNet-8, digits of MNIST",
        "accuracy",
        data.digits,
        lambda: networks.residual_network(blocks=1, classes=10),
        batch=16,
        epochs=10,
        recipe=Recipe(0.1, 0.9, 1e-4),
    ),
    "text": Task(
        "LSTM, characters of Python's library",
        "loss",
        lambda: data.source_text(length=32, training_elems=400_000, validation_elems=64_000),
        lambda: networks.CharacterModel(len(data.ALPHABET), embedding=32, hidden=96),
        batch=8,
        epochs=4,
        recipe=Recipe(1.0, 0.9, 0.0),
    ),
}
