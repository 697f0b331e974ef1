"""Horovod as one of the measured systems: its sums are right, and what lacks it says what to do."""

from __future__ import annotations

import pytest

from experiments import figure7, figure10
from experiments.campaign.campaign import Campaign, Point
from experiments.campaign.job import run_job
from experiments.campaign.records import Records
from experiments.cluster import Cluster, missing_requirements
from experiments.emulation import systems
from experiments.emulation.systems import SYSTEMS, USUAL

_HOROVOD = SYSTEMS["horovod"]
_PROBLEM = missing_requirements() or _HOROVOD.missing
needs_horovod = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


@pytest.mark.long
@needs_horovod
def test_all_workers_get_the_sum_of_what_all_have():
    with Cluster(3) as cluster:
        job = run_job(cluster, _HOROVOD, ["tests.workers.all_reduced"], 90.0, {})
    assert sorted(end["rank"] for end in job.ends) == [0, 1, 2]
    for end in job.ends:
        assert end["workers"] == 3
        assert end["wrong"] == {what: [0] * 5 for what in ("broadcast", "round 0", "round 1")}


@pytest.mark.long
@needs_horovod
def test_a_run_is_kept_with_horovods_version(tmp_path):
    at = Point("three_layers", 2, 500.0, 1.0, ("horovod",), 2)
    records = Records(tmp_path / "horovod.json", {})
    with Campaign(records, warm_up=1) as measuring:
        measuring.measure([at], 1)
    (run,) = Records(records.path, {}).runs
    assert run["versions"] == {"horovod": "0.28.1"}
    assert len(run["iteration_s"]) == 2 and "failures" not in run
    assert min(run["iteration_s"]) > 0.98 * run["compute_s"]


@pytest.mark.parametrize("figure", [figure7, figure10])
def test_without_it_one_line_says_how_to_build_it(figure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(systems, "_HOROVOD", tmp_path)
    with pytest.raises(SystemExit):
        figure.main(["--systems", "p3kv", "horovod"])
    assert "Horovod is not there yet: ./scripts/horovod builds it" in capsys.readouterr().err


def test_figures_do_without_it_unless_asked():
    usual = [SYSTEMS[name] for name in USUAL]
    assert not any(system.all_reduce or system.encodes for system in usual)
