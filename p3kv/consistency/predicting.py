"""Weights some updates ahead, by what an optimizer remembers: weight prediction as in SpecTrain
(C.-C. Chen et al., arXiv 1809.02839, 3.3), for optimizers of all front ends.

A prediction needs the gradients to come. Equation 4 takes each for the mean that momentum has
smoothed out of those before, so that momentum stays as it is. A damped prediction takes each for
0, so that momentum decays: less when gradients mostly cancel, and too little when they do not.
"""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np


def momentum_updates(momentum: float, steps: int, damped: bool) -> float:
    """By how many updates like the last one a weight changes in `steps` updates of SGD with this
    momentum, where the last one changed it by its momentum alone.

    With mom = momentum * mom - lr * gradient, and w = w + mom, a mean gradient of
    -(1 - momentum) * mom / lr leaves mom as it is, which is equation 4: w + steps * mom.
    """
    if not damped:
        return float(steps)
    return math.fsum(momentum**i for i in range(1, steps + 1))


def adam(
    weight: np.ndarray,
    mean: np.ndarray,
    square: np.ndarray,
    updates: int,
    rate: float,
    betas: Sequence[float],
    epsilon: float,
    epsilon_is_corrected: bool,
    decay: float,
    steps: int,
    damped: bool,
) -> np.ndarray:
    """A weight that Adam has updated so often, `steps` updates later, as a new array.

    `mean` and `square` are the running averages of gradients and of their squares. Gradients that
    are their corrected mean, with squares that are theirs, leave both as they are once corrected,
    so each update is like the last (XPipe, arXiv 1911.04610, has the same rule). Damped: both
    decay. `epsilon_is_corrected`: the square root is corrected before epsilon is added, as in
    algorithm 1 of Adam's paper, and not after, as at the end of its section 2. `decay` is what
    AdamW takes of the weight in each update, as a part of it.
    """
    predicted = weight.copy()
    first, second = betas
    for ahead in range(1, steps + 1):
        gone = ahead if damped else 0
        correction = math.sqrt(1 - second ** (updates + gone))
        scale = rate * correction / (1 - first ** (updates + gone)) * first**gone
        small = epsilon * correction if epsilon_is_corrected else epsilon
        if decay:
            predicted *= 1 - decay
        predicted -= scale * mean / (np.sqrt(square) * math.sqrt(second**gone) + small)
    return predicted
