"""The digits on which both quickstarts train, and how each compares its trainings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

EPOCHS = 15
BATCH = 64
SEED = 2
RATE, MOMENTUM, WEIGHT_DECAY = 0.03, 0.9, 1e-4
GOOD_ACCURACY = 0.97
MOST_DIFFERENT = 1e-3
"""Rounding makes weights differ by some 1e-6; one lost gradient, by a thousand times that."""
PICTURE = Path(__file__).resolve().parent.parent / "quickstart.png"
_LOOKS = (("tab:orange", 6, 0.4), ("tab:green", 3, 0.6), ("tab:blue", 1, 1))
"""Colour, width and opacity of the curves, the last one on top."""

Weights = Dict[str, np.ndarray]


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) in 0..1 as float32, and which digit each shows."""

    images: np.ndarray
    labels: np.ndarray


class Training(NamedTuple):
    """What a training leaves: its name, weights, the loss of each step, seconds and accuracy."""

    title: str
    weights: Weights
    losses: List[float]
    took_s: float
    accuracy: float


def read_digits() -> tuple[Digits, Digits]:
    """Return the 1,797 digits of scikit-learn: 1,437 to train with and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=SEED
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


def batches(digits: Digits, epoch: int) -> Iterator[np.ndarray]:
    """Yield the numbers of the images in each whole batch of an epoch, alike in every process."""
    order = np.random.RandomState([SEED, epoch]).permutation(len(digits.labels))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        yield order[start : start + BATCH]


def part_of_batch(rank: int, num_workers: int) -> slice:
    """Return worker `rank`'s part of each batch. Ends the script if parts would not be equal."""
    if BATCH % num_workers:
        raise SystemExit(f"a batch of {BATCH} cannot be split evenly among {num_workers} workers")
    return slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)


def report(with_p3: Training, others: List[Training], facts: str, further: str) -> int:
    """Draw and print how p3kv's training compares with others; return the exit code.

    `facts` are further lines, and `further` is the command that shows a gain.
    """
    _draw([*others, with_p3])
    trainings = [with_p3, *others]
    images = len(with_p3.losses) * BATCH
    apart = [_difference(with_p3.weights, one.weights) for one in others]
    rows = [
        ["", *(one.title for one in trainings)],
        ["test accuracy", *(f"{one.accuracy:.2%}" for one in trainings)],
        ["images/s", *(f"{images / one.took_s:,.0f}" for one in trainings)],
        [
            "weights: most unlike P3's",
            "",
            *(f"{most:.1e} at most" if most else "0" for most in apart),
        ],
    ]
    table = "\n".join(f"{row[0]:29}" + "".join(f"{one:18}" for one in row[1:]) for row in rows)
    print(
        f"""
{table}
{facts}
Loss curves: {PICTURE}

All processes share the {len(os.sched_getaffinity(0))} cores of this machine, and no network lies \
between them, so P3 has
nothing to gain here: more workers are no faster than one process. Where it helps, between hosts
as network namespaces with limited links (as root, some three minutes):

    {further}
"""
    )
    problems = []
    if with_p3.accuracy < GOOD_ACCURACY:
        problems.append(f"the accuracy is below {GOOD_ACCURACY:.0%}")
    if max(apart) > MOST_DIFFERENT:
        problems.append(f"weights differ by more than {MOST_DIFFERENT:g}")
    for problem in problems:
        print(f"{problem}: something is wrong", flush=True)
    return 1 if problems else 0


def _difference(weights: Weights, others: Weights) -> float:
    return max(float(np.abs(weights[name] - others[name]).max()) for name in others)


def _draw(trainings: List[Training]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for training, (colour, width, alpha) in zip(trainings, _LOOKS[-len(trainings) :]):
        axes.plot(training.losses, color=colour, linewidth=width, alpha=alpha, label=training.title)
    axes.set(
        xlabel="step",
        ylabel="loss on worker 0's part of the batch",
        yscale="log",
        title="The same training with P3 and without",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=120)
