"""What creating the store does to a process, and what servers do until then."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.jobs import (
    DEADLINE_S,
    JOIN,
    SUMS_ONLY,
    end,
    eventually,
    held_port,
    results,
    run_job,
    start_role,
)

BUSY = """
import p3kv, sys, time
deadline = time.monotonic() + 60
while not __import__("os").path.exists(sys.argv[1]):
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def test_what_the_scheduler_answers_before_the_store_is_made_is_logged() -> None:
    script = "import p3kv, sys, time; time.sleep(2); sys.exit(3)"
    with held_port() as port:
        number = port.getsockname()[1]
        scheduler = start_role("scheduler", JOIN, number, workers=2)
        command = [sys.executable, "-c", script]
        worker = start_role("worker", command, number, workers=2, P3KV_VERBOSE=1)
        try:
            assert "the scheduler has answered" in worker.communicate(timeout=DEADLINE_S)[0]
        finally:
            end(worker)
            end(scheduler)


def test_servers_get_ready_for_optimizers_while_workers_build_their_models(tmp_path: Path) -> None:
    model_is_built = tmp_path / "built"
    worker = [sys.executable, "-c", BUSY, str(model_is_built)]
    serve = [sys.executable, "-c", "import p3kv"]
    with held_port() as holder:
        port = holder.getsockname()[1]
        processes = {
            "scheduler": start_role("scheduler", serve, port),
            "server": start_role("server", serve, port),
            "worker": start_role("worker", worker, port),
        }
        server = psutil.Process(processes["server"].pid)
        try:
            eventually(lambda: any("libmxnet" in one.path for one in server.memory_maps()))
            model_is_built.touch()
            ended = results(processes, time.monotonic(), timeout_s=DEADLINE_S)
        finally:
            for process in processes.values():
                end(process)
    for name in ("scheduler", "server"):
        # Not even MXNet's line on the engine that servers use.
        assert (ended[name].code, ended[name].output) == (0, "")


@pytest.mark.parametrize(
    ("setting", "with_store"),
    [
        (None, "0.000100"),
        pytest.param("0.002", "0.002000", marks=pytest.mark.long),
        ("0", "0.005000"),
    ],
)
def test_the_switch_interval_is_lowered_while_the_store_exists(
    setting: str, with_store: str
) -> None:
    changes = {} if setting is None else {"P3KV_SWITCH_INTERVAL_S": setting}
    result = run_job("switch_interval.py", **changes, **SUMS_ONLY)
    assert result.code == 0, result.output
    assert result.said_by("worker 0").split() == ["0.005000", with_store, "0.005000"]
