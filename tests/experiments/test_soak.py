"""The soak finds what grows, and takes neither noise nor single peaks for growth."""

from __future__ import annotations

import random
from typing import List

import pytest

from scripts.soak import Sample, growth


def course(mib_per_hour: float, descriptors_per_hour: float = 0.0) -> List[Sample]:
    """Two hours with noise and peaks, after a beginning in which memory doubles."""
    chance = random.Random(1)
    samples = []
    for number in range(1440):
        at_s = 5.0 * number
        rss = 150.0 + mib_per_hour * at_s / 3600 + chance.uniform(-2, 2)
        rss -= max(0.0, 75.0 - at_s / 10)
        rss += 40.0 if chance.random() < 0.05 else 0.0
        samples.append(Sample(at_s, rss, 20 + int(descriptors_per_hour * at_s / 3600), 10))
    return samples


def test_noise_and_peaks_and_a_beginning_are_no_growth() -> None:
    found = growth(course(0.0))
    assert found["rss_mib"]["median"] == pytest.approx(150, abs=1)
    assert found["rss_mib"]["grown"] == pytest.approx(0, abs=0.002)
    assert found["descriptors"] == {"median": 20, "grown": 0}


def test_what_grows_is_found() -> None:
    found = growth(course(4.0, descriptors_per_hour=3.0))
    assert found["rss_mib"]["grown"] == pytest.approx(4 * 1.5 / 155, abs=0.005)
    assert found["descriptors"]["grown"] > 0.1
    assert found["threads"]["grown"] == 0
