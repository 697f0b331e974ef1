"""Waits for the files of a job's only checkpoint."""

import os
import time
from pathlib import Path


def wait_for_checkpoint(files: int) -> None:
    """Returns when it has so many files; fails when that takes too long."""
    folder, deadline = Path(os.environ["P3KV_CHECKPOINT_DIR"]), time.monotonic() + 60
    while len(list(folder.glob("*.npz"))) < files:
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.02)
