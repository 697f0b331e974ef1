"""The environment that has torch and no MXNet; `scripts/test` makes it."""

from __future__ import annotations

import pytest

from tests.jobs import ROOT

PYTHON = ROOT / ".torch" / "bin" / "python"
NEEDS_TORCH = pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no environment with torch: scripts/test makes one"
)
