"""Trains arrays by the example's front end, and compares each step's weights and velocities with
NumPy's own arithmetic, bit for bit: first step, last step, where the job is to have begun."""

from __future__ import annotations

import sys

import numpy as np

import p3kv  # noqa: F401

# isort: split
from front_end import Trainer

RATE, MOMENTUM = np.float32(0.1), np.float32(0.9)
SHAPES = {"small": (3,), "large": (300, 400), "scalar": (), "middle": (70, 11)}


def gradients(step: int, rank: int) -> dict:
    drawn = np.random.default_rng((step, rank))
    return {name: drawn.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


last, begun = int(sys.argv[1]), int(sys.argv[2])
expected = {
    name: np.random.default_rng(7).normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
velocities = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
weights = {name: np.array(first) for name, first in expected.items()}
trainer = Trainer(weights, rate=float(RATE), momentum=float(MOMENTUM))
assert trainer.resumed_steps == begun, trainer.resumed_steps
for refused in (trainer.step, lambda: trainer.push("small", np.ones(4, np.float32))):
    try:
        refused()
    except ValueError as error:
        assert "before any gradient" in str(error) or "(3,)" in str(error), error
    else:
        raise AssertionError("it was not refused")
for step in range(1, last + 1):
    rate = RATE if step < 3 else np.float32(0.05)
    by_rank = [gradients(step, rank) for rank in range(trainer.num_workers)]
    for name in SHAPES:
        total = by_rank[0][name] + by_rank[1][name]
        velocities[name] = velocities[name] * MOMENTUM + total / np.float32(2)
        expected[name] = expected[name] - rate * velocities[name]
    if step <= begun:
        continue
    trainer.optimizer.rate = float(rate)
    for name in reversed(SHAPES):
        trainer.push(name, by_rank[trainer.rank][name])
    trainer.step()
    for name in SHAPES:
        value = trainer.value(name)
        assert value.tobytes() == np.asarray(expected[name], np.float32).tobytes(), (step, name)
for name in SHAPES:
    assert trainer.velocity(name).tobytes() == np.asarray(velocities[name]).tobytes(), name
print("right", flush=True)
