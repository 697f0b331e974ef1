"""Hyper-parameters: the best of the rates that were tried with exact weights, for all rules."""

from __future__ import annotations

from experiments.training.tasks import Recipe

RECIPES = {"digits": Recipe(0.05, 0.9, 1e-4), "text": Recipe(2.0, 0.9, 0.0)}
"""By task, for SGD."""
OPTIMIZERS = {"sgd": RECIPES["digits"], "adam": Recipe(0.01, 0.0, 0.0)}
"""For the digits: Adam has no momentum in this sense."""
