"""p3kv attaches itself to MXNet whenever that is imported, and says so where there is none."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.jobs import ROOT, SCRIPTS, SUMS_ONLY, environment, run, run_job

REGISTERED = """
from mxnet.kvstore import KVStoreBase
assert KVStoreBase.kv_registry["p3"].__module__ == "p3kv.frontends.mxnet.stores"
"""
PROBE = "import importlib.util as util; found = util.find_spec('mxnet')\n"


@pytest.fixture
def without_mxnet(tmp_path: Path) -> Path:
    """A folder with all packages that are installed here, but MXNet."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("mxnet"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


@pytest.mark.parametrize(
    "program",
    ["import p3kv, mxnet", "import mxnet, p3kv", f"import p3kv\n{PROBE}assert found\nimport mxnet"],
    ids=["before", "after", "before somebody looks for it"],
)
def test_importing_p3kv_before_or_after_mxnet_registers_the_store(program: str) -> None:
    result = run([sys.executable, "-c", program + REGISTERED], environment(), 60)
    assert result.code == 0, result.output


def test_a_script_without_mxnet_is_told_what_to_install(without_mxnet: Path) -> None:
    program = f"import p3kv\n{PROBE}assert not found\nimport mxnet"
    # -S: nothing but these folders.
    command = [sys.executable, "-S", "-c", program]
    result = run(command, environment(PYTHONPATH=f"{ROOT}:{without_mxnet}"), 60)
    assert result.code == 1
    last = result.output.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named 'mxnet': "), result.output
    assert "pip install '.[cpu]'" in last and "cu112" in last


def test_a_script_may_go_on_without_mxnet(without_mxnet: Path) -> None:
    program = (
        "import p3kv\n"
        "try:\n"
        "    import mxnet\n"
        "except ModuleNotFoundError as error:\n"
        "    print('without', error.name)\n"
    )
    command = [sys.executable, "-S", "-c", program]
    result = run(command, environment(PYTHONPATH=f"{ROOT}:{without_mxnet}"), 60)
    assert (result.code, result.output) == (0, "without mxnet\n")


@pytest.mark.parametrize("in_a_job", [True, False])
def test_a_worker_s_full_collections_leave_out_what_mxnet_s_import_has_made(
    in_a_job: bool,
) -> None:
    if in_a_job:
        result = run_job("collecting.py", **SUMS_ONLY)
    else:
        result = run([sys.executable, str(SCRIPTS / "collecting.py")], environment(), 60)
    assert result.code == 0, result.output
    said = re.search(r"look at (\d+) objects and leave out (\d+)", result.output)
    assert said is not None, result.output
    looked_at, left_out = int(said[1]), int(said[2])
    if in_a_job:
        assert left_out > 50_000 > 5 * looked_at
    else:
        assert left_out == 0
