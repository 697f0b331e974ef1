"""A script that computes in Python does not keep the network waiting."""

from __future__ import annotations

import json
from statistics import median

import pytest

from experiments.cluster import Cluster, missing_requirements
from tests.jobs import DEADLINE_S, SUMS_ONLY, start_on


@pytest.mark.alone
@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_rounds_take_no_longer_while_the_script_computes() -> None:
    with Cluster(2, 400.0) as cluster:
        started = start_on(cluster, "busy.py", **SUMS_ONLY)
        outputs = [(role, process.communicate(timeout=DEADLINE_S)[0]) for role, process in started]
    assert all(process.returncode == 0 for _, process in started), outputs
    for said in (output for role, output in outputs if role == "worker"):
        seconds = json.loads(said.splitlines()[-1])
        # With Python's own switch interval, several times as long.
        assert median(seconds["busy"]) < 1.5 * median(seconds["calm"]), seconds
