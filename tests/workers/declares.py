"""Joins a job without MXNet, and declares a key whose gradients travel by the codec that is named,
or in two bits."""

import p3kv  # noqa: F401, I001
import sys

from p3kv import config
from p3kv.common.registry import Choice
from p3kv.worker import this_process

worker = this_process.worker()
worker.start(config.settle())
store = worker.new_store()
store.choose_gradient_codec(Choice((sys.argv[1:] or ["2bit"])[0]))
store.declare("w", (3,), "float32")
worker.barrier()
print(f"worker {worker.rank} has declared its key")
