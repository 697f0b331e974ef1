"""A forecast lies between the bound and what was measured with each store."""

from __future__ import annotations

import pytest

from experiments.models import load
from p3kv.report.forecast import Workload, bound, forecast

SMALL = Workload([[(0, 1_000_000)], [(1, 500_000)]], [0.1, 0.1], [0.2, 0.2])


def test_stores_come_in_the_order_of_their_measured_times() -> None:
    """Measured at M/C = 1 on four hosts (figure 7): p3kv 2.4 % above the bound, `dist_sync` 1.41
    times as long as p3kv."""
    model = load("resnet50")
    link_bit_s = bound.link_for_ratio_bit_s(1.0, model.compute_s, model.size_bytes, 4)
    found = forecast(model.workload, 4, link_bit_s)
    assert found.compute_s <= found.bound_s <= found.p3kv_s < 1.02 * found.bound_s
    assert found.p3kv_s < found.perfect_fifo_s <= found.fifo_s <= found.dist_sync_s
    assert found.dist_sync_s / found.p3kv_s == pytest.approx(1.41, rel=0.05)


def test_one_host_and_a_network_without_limit_take_the_compute_time() -> None:
    alone = forecast(SMALL, 1, 1e6)
    assert alone == pytest.approx([SMALL.compute_s] * len(alone))
    free = forecast(SMALL, 8, 1e15)
    assert free == pytest.approx([SMALL.compute_s] * len(free), rel=1e-6)


def test_more_hosts_and_a_slower_link_take_longer() -> None:
    of_four, of_many = forecast(SMALL, 4, 1e8), forecast(SMALL, 64, 1e8)
    slower = forecast(SMALL, 4, 5e7)
    for name in ("bound_s", "p3kv_s", "fifo_s"):
        assert getattr(of_four, name) < getattr(of_many, name)
        assert getattr(of_four, name) < getattr(slower, name)


@pytest.mark.parametrize(("hosts", "link_bit_s"), [(0, 1e9), (4, 0.0)])
def test_what_is_no_network_has_no_forecast(hosts: int, link_bit_s: float) -> None:
    with pytest.raises(ValueError, match=f"{hosts} hosts and {link_bit_s} bit/s"):
        forecast(SMALL, hosts, link_bit_s)
