"""Hyper-parameters, the same for all rules."""

from __future__ import annotations

from experiments.training.tasks import Recipe

RECIPES = {
    "digits": (Recipe(0.05, 0.9, 1e-4),),
    "text": (Recipe(2.0, 0.9, 0.0), Recipe(0.5, 0.9, 0.0)),
}
"""By task, for SGD: first with the best of the rates that were tried with exact weights, each twice
the one before. With stale weights this rate is too high for the text."""
OPTIMIZERS = {"sgd": RECIPES["digits"][0], "adam": Recipe(0.01, 0.0, 0.0)}
"""For the digits, in the same way: Adam's rates were 0.003, 0.01 and 0.03."""
