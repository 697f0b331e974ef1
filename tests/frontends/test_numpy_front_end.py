"""The example's front end for NumPy arrays: what a front end needs of p3kv is enough for one."""

from __future__ import annotations

import os
from pathlib import Path

from tests.jobs import ROOT, environment, launch_command, run

FOLDER = ROOT / "examples" / "numpy_front_end"
MOST_LINES = 300


def settings(**changes: object) -> dict:
    """Of a job in whose processes the example's modules can be imported."""
    values = environment(P3KV_PLUGINS="front_end", **changes)
    values["PYTHONPATH"] += f"{os.pathsep}{FOLDER}"
    return values


def test_weights_and_velocities_are_numpys_bit_for_bit_also_after_a_resume(tmp_path: Path) -> None:
    saved = {"P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 2, "P3KV_SLICE_SIZE": 20_000}
    for last, begun, servers in ((4, 0, 2), (7, 4, 1)):
        command = launch_command("numpy_exact.py", [last, begun], workers=2, servers=servers)
        result = run(command, settings(**saved, P3KV_RESUME=int(begun > 0)), 60)
        assert result.code == 0, result.output
        assert result.output.count("right") == 2, result.output


def test_a_front_end_is_small() -> None:
    lines = (FOLDER / "front_end.py").read_text().splitlines()
    assert len(lines) <= MOST_LINES
