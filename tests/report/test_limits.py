"""The verdict names what limits a job, whatever that is, and its share of a step."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List

import pytest

from experiments.cluster import Cluster, missing_requirements
from tests.jobs import environment, launch_command, output_of, run, start_on

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

CLOSE = 0.05
MOST_BUSY = 0.2
_ATTEMPTS = 3
SETTINGS = {"P3KV_SUMMARY_EVERY": 1_000_000}  # only the verdict at the end
NAMES = {
    "script": "the script itself",
    "computing": "computation",
    "network": "the network",
    "straggler": "a slow worker",
    "server": "a busy server",
    "processor": "too few processors",
}


def told(output: str) -> List[Dict[str, Any]]:
    found = [line[line.index("{") :] for line in output.splitlines() if '{"rank"' in line]
    return sorted((json.loads(line) for line in found), key=lambda one: one["rank"])


def check(one: Dict[str, Any], output: str) -> None:
    """A worker names the part that is the truth, with its share, and says no more than there is."""
    part, share = one["truth"]
    found, waits = one["shares"][part], one["shares"]["processor"]
    if part == "processor":
        waits = 0.0
    assert waits < MOST_BUSY, output
    # Where others keep the machine busy, a part of it is waiting for a free processor.
    assert found - CLOSE <= share <= found + waits + CLOSE, output
    assert min(one["shares"].values()) >= 0
    assert sum(one["shares"].values()) == pytest.approx(1)
    stats = one["stats"]
    parts = ("computing", "script", "network", "server", "straggler", "processor")
    assert sum(stats[f"{name}_s"] for name in parts) == pytest.approx(stats["step_s"])
    assert stats["verdict"]["limit"] == part, output


def undisturbed(shows: Callable[[], None]) -> None:
    """A busy machine adds causes of its own to a job's: one of some attempts must be right."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return shows()
        except AssertionError:
            if not left:
                raise


def launched(cause: str, *arguments: object, servers: int = 2, cores: str = "") -> str:
    command = launch_command("limited.py", [cause, *arguments], 2, servers)
    if cores:
        command = ["taskset", "-c", cores, *command]
    env = environment(P3KV_OPTIMIZERS="slow_optimizer", **SETTINGS)
    result = run(command, env, 90.0)
    assert result.code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("cause", "arguments", "servers", "cores"),
    [
        ("data", [200, 0.002, 0.03], 2, ""),
        ("server", [40, 0.05, 0.1], 1, ""),
        pytest.param("computing", [40, 0.2, 0.0], 2, "", marks=pytest.mark.long),
        pytest.param("cores", [40, 0.0, 0.1], 2, "0", marks=pytest.mark.long),
    ],
)
def test_on_one_machine(cause: str, arguments: List[float], servers: int, cores: str) -> None:
    def shows() -> None:
        output = launched(cause, *arguments, servers=servers, cores=cores)
        workers = told(output)
        assert len(workers) == 2, output
        for one in workers:
            check(one, output)
        part = workers[0]["truth"][0]
        assert f"the job's limit is {NAMES[part]}: of a step's " in output, output

    undisturbed(shows)


def test_one_slow_worker() -> None:
    def shows() -> None:
        output = launched("straggler", 60, 0.1, 0.1)
        quick, slow = told(output)
        check(quick, output)
        assert slow["shares"]["computing"] > 0.9, output
        assert f"the job's limit is {NAMES['straggler']}: of a step's " in output, output
        assert "look at worker 1" in output, output

    undisturbed(shows)


@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_the_link() -> None:
    def shows() -> None:
        # So slow that the servers' work, which has a name of its own, is little of a step.
        with Cluster(2, 10.0) as cluster:
            started = start_on(cluster, "limited.py", ["link", 14, 0.9, 0], **SETTINGS)
            outputs = [output_of(process, 90.0) or "" for _, process in started]
        output = "\n".join(outputs)
        workers = told(output)
        assert len(workers) == 2, output
        for one in workers:
            check(one, output)
        assert f"the job's limit is {NAMES['network']}: of a step's " in output, output

    undisturbed(shows)
