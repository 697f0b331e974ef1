"""A disk with little room."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Mounts a file system of this size at a folder, which is made; skips the test without root."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
