"""The environment that has torch and no MXNet: `scripts/test` makes one, and `scripts/accelerator`
runs tests in its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT

PYTHON = ROOT / ".torch" / "bin" / "python"
if importlib.util.find_spec("torch") is not None:
    PYTHON = Path(sys.executable)
NEEDS_TORCH = pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no environment with torch: scripts/test makes one"
)
