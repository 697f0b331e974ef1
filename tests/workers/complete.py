"""Scripts that wait for checkpoints, and end processes of their own job."""

import logging
import os
import signal
import time
from typing import Dict


def kill(victim: str) -> None:
    """Kills processes of this job."""
    import psutil  # not where torch is

    parts: Dict[str, psutil.Process] = {}
    for process in psutil.Process(os.getppid()).children():
        env = process.environ()
        role = env.get("DMLC_ROLE", "")
        if env.get("P3KV_JOB") == os.environ["P3KV_JOB"]:
            parts[f"{role} {env.get(f'DMLC_{role.upper()}_ID', '')}".strip()] = process
    mine = [one for one in parts.values() if one.pid == os.getpid()]
    others = [one for one in parts.values() if one.pid != os.getpid()]
    for process in [*others, *mine] if victim == "all" else [parts[victim]]:
        process.send_signal(signal.SIGKILL)


class Complete(logging.Handler):
    """Counts the checkpoints that this worker knows to be complete.

    Their files are there earlier, while the next checkpoint may still be refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        logger = logging.getLogger("p3kv.worker.saving.checkpoints")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().endswith(" is complete")

    def wait(self, count: int) -> None:
        """Returns when so many are."""
        deadline = time.monotonic() + 30
        while self.count < count:
            folder = os.environ["P3KV_CHECKPOINT_DIR"]
            assert time.monotonic() < deadline, f"no {count} checkpoints: {os.listdir(folder)}"
            time.sleep(0.02)
