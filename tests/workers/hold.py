"""Joins a job, says where and with which environment, and stays until it may end.

Arguments: a folder; then ranks with the exit code that each is to end with at once, as "1=7".
"""

import json
import os
import sys
import time
from pathlib import Path

import p3kv  # noqa: F401
from p3kv import config
from p3kv.worker import this_process

folder = Path(sys.argv[1])
codes = dict(word.split("=") for word in sys.argv[2:])
worker = this_process.worker()
worker.start(config.freeze())
worker.barrier()
print(f"worker {worker.rank} of {worker.num_workers} has joined")
told = {
    "env": dict(os.environ), "network": os.readlink("/proc/self/ns/net"), "cwd": os.getcwd(),
    "on_this_host": worker.on_this_host,
}  # fmt: skip
(folder / "new").mkdir(exist_ok=True)
(folder / "new" / str(worker.rank)).write_text(json.dumps(told))
(folder / "new" / str(worker.rank)).rename(folder / f"worker-{worker.rank}")
if str(worker.rank) in codes:
    sys.exit(int(codes[str(worker.rank)]))
while not (folder / "stop").exists():
    worker.check()
    time.sleep(0.02)
