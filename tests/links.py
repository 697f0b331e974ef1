"""What tests of throttled links have in common."""

from __future__ import annotations


def assert_reaches(measure, rate_mbit_s, excess=1.05):
    """`measure` gives links; a busy machine slows who measures, but nothing may exceed the rate."""
    for _attempt in range(5):
        shares = [link.mbit_s / (rate_mbit_s * 0.957) for link in measure()]
        assert max(shares) <= excess
        if min(shares) >= 0.95:
            return
    raise AssertionError(f"the last of five attempts gave {shares} of the rate")
