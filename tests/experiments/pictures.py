"""Checks of the pictures that experiments leave."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt


def assert_is_picture(path: Path, least_pixels: int = 200_000) -> None:
    """It can be decoded, is large enough and not of one colour."""
    pixels = plt.imread(path)
    assert pixels.shape[0] * pixels.shape[1] >= least_pixels
    assert pixels.std() > 0.01, "the picture has one colour"
