"""Jobs run clean in Python's development mode with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.jobs import DEADLINE_S, TrainingJob, end, output_of, start_role

MXNET_WARNS_IN = (
    "mxnet.numpy.utils", "mxnet.numpy.fallback", "mxnet.numpy_dispatch_protocol",
    "mxnet.ndarray.utils",
)  # fmt: skip
"""Modules of MXNet 1.9.1 that use what NumPy, Python and SciPy will remove."""
STRICT = {
    "PYTHONDEVMODE": 1,
    "PYTHONWARNINGS": ",".join(
        ["error", *(f"ignore::DeprecationWarning:{module}" for module in MXNET_WARNS_IN)]
    ),
}


def test_a_job_of_two_workers_and_servers_has_nothing_to_warn_of(tmp_path: Path) -> None:
    job = TrainingJob(
        tmp_path,
        2,
        2,
        arguments=[0.0],
        script="enduring.py",
        P3KV_TRACE=tmp_path / "trace",
        **STRICT,
    )
    with job:
        job.wait_until_training()
        job.stop()
        result = job.result(timeout_s=DEADLINE_S)
    assert result.code == 0, result.output
    # Python only prints what destructors warn of, so each line counts.
    lines = [line for line in result.output.splitlines() if "engine.cc" not in line]
    assert len(lines) == 2, result.output
    assert all("bit for bit the weights of one process" in line for line in lines), result.output


@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_process_that_has_no_address_leaves_nothing_open(role: str) -> None:
    code = [sys.executable, "-c", "import p3kv"]
    process = start_role(role, code, 9, DMLC_INTERFACE="none0", **STRICT)
    try:
        output = output_of(process, DEADLINE_S)
    finally:
        end(process)
    assert output is not None and len(output.splitlines()) == 1, output
    assert "DMLC_INTERFACE is 'none0', which has no address that others can reach" in output
